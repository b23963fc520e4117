import torch
from stage import Loss, show, trained
from torch import Tensor, nn
import gradtrace as gt
from gradtrace.tables import Column, Table
from gradtrace.trace import Trace
WORDS, GAP = 8, 6
def batch(size=32):
    return torch.randint(1, WORDS, (size, 10))
def run(steps: str = "150"):
    from transformers import MambaConfig, MambaForCausalLM
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, conv_kernel=2, use_cache=False, pad_token_id=0,bos_token_id=0,eos_token_id=0)
    model = MambaForCausalLM(config)
    def score(model, words):
        first = words[:, :1].expand(-1, words.shape[1]-1)
        return nn.functional.cross_entropy(model(words).logits[:, 1:].reshape(-1, WORDS), first.reshape(-1))
    import time; t=time.process_time()
    trained(model, lambda: score(model, batch()), int(steps))
    print("train", time.process_time()-t)
    words = batch(4)
    return model, lambda model: score(model, words)
def tell(model, loss_fn, trace):
    print(loss_fn(model))
    print(trace.influence("arguments").table().text(limit=80, width=90))
    for _, p in zip(range(3), trace.paths("backbone.embeddings.weight", sample=10)):
        print(p.table().text(limit=60))
    return [], ""
if __name__ == "__main__":
    show(run, tell, "mamba")
