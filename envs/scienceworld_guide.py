import gzip, json
def read_lines(path):
    with gzip.open(path,"rt",encoding="utf-8") as f:
        for l in f: yield json.loads(l)
make_train_data=make_eval_data=None
