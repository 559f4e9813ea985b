"""Computes golden losses and gradients of a folder from write_initial, by PyTorch in double precision.

    build/release/tests/write_initial gpt-nano /tmp/gpt-nano
    /usr/bin/python3 tests/peers/golden.py /tmp/gpt-nano tests/peers/gpt-nano [--transformers]

writes tests/peers/gpt-nano.json, the losses of 20 steps, and tests/peers/gpt-nano-gradients.safetensors, every element of the
first step's gradients rounded to f32. Needs PyTorch 1.13 or later (Debian's python3-torch) and numpy. With --transformers it also
checks that AutoModelForCausalLM opens the folder and has the same loss.
"""
import argparse
import json

import torch

import models

STEPS = 20

arguments = argparse.ArgumentParser()
arguments.add_argument('folder')
arguments.add_argument('output', help='without an ending')
arguments.add_argument('--transformers', action='store_true')
options = arguments.parse_args()
torch.set_num_threads(1)

config = json.load(open(options.folder + '/config.json'))
weights = {name: tensor.double().requires_grad_() for name, tensor in models.read_safetensors(options.folder + '/model.safetensors').items()}
batches = list(models.batches(2)) * (STEPS // 2)  # two alternating batches: they are learned fast, so the losses change clearly

if options.transformers:
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(options.folder, output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys'], info
    tokens, targets = batches[0]
    logits = model.eval()(tokens).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    ours = models.loss_of(config, weights, tokens, targets).item()
    print(f'transformers: {theirs:.7f}, written down: {ours:.7f}')
    assert abs(theirs - ours) < 1e-5

optimizer = torch.optim.AdamW([
    {'params': [w for w in weights.values() if w.dim() >= 2], 'weight_decay': 0.01},
    {'params': [w for w in weights.values() if w.dim() < 2], 'weight_decay': 0.0},
], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
losses = []
for tokens, targets in batches:
    loss = models.loss_of(config, weights, tokens, targets)
    optimizer.zero_grad()
    loss.backward()
    if not losses:
        models.write_safetensors(options.output + '-gradients.safetensors', {name: w.grad for name, w in weights.items()})
    losses.append(loss.item())
    optimizer.step()
with open(options.output + '.json', 'w') as file:
    json.dump({'torch': torch.__version__, 'losses': losses}, file, indent=0)
    file.write('\n')
print(losses[0], losses[-1])
