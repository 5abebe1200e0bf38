"""A small language model: get_batch and no loader, AdamW groups, tied weights, accumulation, clipping, cosine by hand."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

max_iters, eval_interval, eval_iters, warmup_iters = 60, 20, 4, 6
learning_rate, min_lr, grad_clip, weight_decay = 5e-3, 5e-4, 5.0, 0.1
gradient_accumulation_steps, batch_size, block_size, vocab_size, n_embd = 4, 4, 16, 11, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 64), nn.GELU(), nn.Linear(64, n_embd), nn.Dropout(0.05))

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def train(watch, seed=0):
    torch.manual_seed(seed)
    data = (torch.arange(4000) * torch.arange(4000) + (torch.rand(4000) < 0.1)) % vocab_size

    def get_batch(split):
        part = data[:3600] if split == "train" else data[3600:]
        ix = torch.randint(len(part) - block_size, (batch_size,))
        x = torch.stack([part[i : i + block_size] for i in ix])
        return x, torch.stack([part[i + 1 : i + 1 + block_size] for i in ix])

    model = GPT()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    nodecay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        out = {split: sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) for split in ("train", "val")}
        model.train()
        return out["val"] / eval_iters

    history = []
    with watch(model, optimizer) as run:
        X, Y = get_batch("train")
        for iter_num in range(max_iters):
            for param_group in optimizer.param_groups:
                param_group["lr"] = get_lr(iter_num)
            if iter_num % eval_interval == 0:
                run.log(validation_loss=estimate_loss())
            for micro_step in range(gradient_accumulation_steps):
                logits, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
                X, Y = get_batch("train")
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            history.append(loss.item())
    return history
