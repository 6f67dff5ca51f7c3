"""A server that speaks as `vllm serve` does where loop_ppo_multigpu.py listens, with a model in this process.

As vLLM does, it keeps what it has computed for an adapter's name: one loaded twice has the first weights.
"""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

BASE = "base"  # the name of the model without adapters


class FakeVLLM(ThreadingHTTPServer):
    """`with FakeVLLM(folder) as server:` it answers at server.url; `asked` has each path and its body."""

    daemon_threads = True

    def __init__(self, model: str | Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.base = AutoModelForCausalLM.from_pretrained(model)
        self.known = {BASE: self.base}  # by name, for ever
        self.loaded = {BASE}
        self.asked = []
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def answer(self, path: str, body: dict) -> tuple[int, str]:
        """Status and text of an answer."""
        self.asked.append((path, body))
        if path == "/v1/load_lora_adapter":
            name = body["lora_name"]
            if name in self.loaded:
                return 400, f"The lora adapter '{name}' has already been loaded."
            if name not in self.known:
                self.known[name] = merged(self.base, Path(body["lora_path"]))
            self.loaded.add(name)
            return 200, f"Success: LoRA adapter '{name}' added successfully."
        name = body.get("lora_name") or body.get("model")
        if name not in self.loaded:
            return 404, f"The model `{name}` does not exist."
        if path == "/v1/unload_lora_adapter":
            self.loaded.remove(name)
            return 200, f"Success: LoRA adapter '{name}' removed successfully."
        if path == "/v1/completions":
            return 200, json.dumps(completion(self.known[name], body))
        return 404, "Not Found"


class Handler(BaseHTTPRequestHandler):
    """Hands requests to the server."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Content-Type"] == "application/json"
        with self.server.lock:
            status, text = self.server.answer(self.path, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def merged(base, folder: Path):
    """A model with the adapters of a folder added, as PEFT has written them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    model = copy.deepcopy(base)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if "lora_A" in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            model.get_submodule(module).weight.data += config["lora_alpha"] / config["r"] * b @ a
    return model


@torch.no_grad()
def completion(model, body: dict) -> dict:
    """Token ids and log-probs of the tempered distribution, as with --logprobs-mode processed_logprobs."""
    assert body["return_token_ids"] and body["logprobs"] == 0 and body["ignore_eos"]
    generator = torch.Generator().manual_seed(body["seed"])
    ids, logps = list(body["prompt"]), []
    while len(logps) < body["max_tokens"] and ids[-1:] != body["stop_token_ids"] * bool(logps):
        logit_V = model(torch.tensor([ids])).logits[0, -1]
        if body["temperature"]:
            logit_V = logit_V / body["temperature"]
        logp_V = logit_V.log_softmax(-1)
        token = (
            logp_V.argmax()
            if not body["temperature"]
            else torch.multinomial(logp_V.exp(), 1, generator=generator)
        )
        ids.append(int(token))
        logps.append(logp_V[ids[-1]].item())
    new = ids[len(body["prompt"]) :]
    choice = {"index": 0, "text": "", "token_ids": new, "logprobs": {"token_logprobs": logps}}
    return {"object": "text_completion", "model": body["model"], "choices": [choice]}
