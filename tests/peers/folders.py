"""Writes small folders with transformers, and its loss: input that --init must support.

    python3 tests/peers/folders.py tests/peers

Needs torch and transformers (written with 4.40; `config_only` runs with 5, which needs no torch for it).
"""
import json
import sys

import transformers

small = dict(
    gpt2=lambda: transformers.GPT2Config(n_layer=2, n_embd=12, n_head=3, vocab_size=256, n_positions=40, bos_token_id=0, eos_token_id=0),
    llama=lambda: transformers.LlamaConfig(num_hidden_layers=2, hidden_size=12, intermediate_size=20, num_attention_heads=3,
                                           num_key_value_heads=1, vocab_size=256, max_position_embeddings=40),
)
root = sys.argv[1]
if sys.argv[2:] == ['config_only']:
    for name, make in small.items():
        with open(f'{root}/{name}-config-{transformers.__version__.split(".")[0]}.json', 'w') as file:
            config = make()
            config.architectures = {'gpt2': ['GPT2LMHeadModel'], 'llama': ['LlamaForCausalLM']}[name]
            file.write(config.to_json_string())
    sys.exit()

import torch
import models
losses = {}
for name, make in small.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and name == 'llama' else 0.0, 0.3)
    model.save_pretrained(f'{root}/transformers-{name}', safe_serialization=True)
    tokens, targets = next(models.batches(1))
    logits = model(tokens).logits
    losses[name] = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
with open(f'{root}/transformers.json', 'w') as file:
    json.dump(losses, file, indent=1)
    file.write('\n')
print(losses)
