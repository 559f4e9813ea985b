"""GPT-2 and Llama after their papers, in plain torch functions: independent of the library and of transformers."""
import json
import math
import struct

import numpy as np
import torch
import torch.nn.functional as F


def read_safetensors(path):
    with open(path, 'rb') as file:
        header = json.loads(file.read(struct.unpack('<Q', file.read(8))[0]))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name != '__metadata__':
            assert entry['dtype'] == 'F32'
            begin, end = entry['data_offsets']
            tensors[name] = torch.from_numpy(np.frombuffer(data[begin:end], dtype='<f4').copy().reshape(entry['shape']))
    return tensors


def write_safetensors(path, tensors):
    """Writes the tensors as f32, in this order."""
    header, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        parts.append(tensor.detach().float().numpy().astype('<f4').tobytes())
        header[name] = {'dtype': 'F32', 'shape': list(tensor.shape), 'data_offsets': [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + b''.join(parts))


def attention(q, k, v):
    """Each is [batch, heads, positions, dim]; fewer key heads than heads mean grouped queries."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(mask, float('-inf'))
    return scores.softmax(-1) @ v


def split(x, heads):
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).flatten(2)


def gpt2(config, w, tokens):
    width, heads, eps = config['n_embd'], config['n_head'], config['layer_norm_epsilon']

    def norm(x, name):
        return F.layer_norm(x, (width,), w[name + '.weight'], w[name + '.bias'], eps)

    def conv1d(x, name):
        return x @ w[name + '.weight'] + w[name + '.bias']

    x = w['wte.weight'][tokens] + w['wpe.weight'][:tokens.shape[1]]
    for i in range(config['n_layer']):
        h = f'h.{i}.'
        q, k, v = conv1d(norm(x, h + 'ln_1'), h + 'attn.c_attn').split(width, -1)
        x = x + conv1d(join(attention(split(q, heads), split(k, heads), split(v, heads))), h + 'attn.c_proj')
        x = x + conv1d(F.gelu(conv1d(norm(x, h + 'ln_2'), h + 'mlp.c_fc'), approximate='tanh'), h + 'mlp.c_proj')
    return norm(x, 'ln_f') @ w['wte.weight'].T


def llama(config, w, tokens):
    heads, kv_heads, eps = config['num_attention_heads'], config['num_key_value_heads'], config['rms_norm_eps']
    dim = config['head_dim']
    angle = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float64),
                        config['rope_theta'] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim))

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w[name + '.weight']

    def rope(x):
        a, b = x[..., :dim // 2], x[..., dim // 2:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = w['model.embed_tokens.weight'][tokens]
    for i in range(config['num_hidden_layers']):
        h = f'model.layers.{i}.'
        y = norm(x, h + 'input_layernorm')
        q, k, v = (y @ w[f'{h}self_attn.{n}_proj.weight'].T for n in 'qkv')
        y = attention(rope(split(q, heads)), rope(split(k, kv_heads)), split(v, kv_heads))
        x = x + join(y) @ w[h + 'self_attn.o_proj.weight'].T
        y = norm(x, h + 'post_attention_layernorm')
        gate, up = (y @ w[f'{h}mlp.{n}_proj.weight'].T for n in ('gate', 'up'))
        x = x + (F.silu(gate) * up) @ w[h + 'mlp.down_proj.weight'].T
    return norm(x, 'model.norm') @ w['lm_head.weight'].T


def batches(steps, batch=4, positions=33):
    """Tokens from a linear congruential generator: (inputs, targets) of every step."""
    state = 1
    for _ in range(steps):
        values = []
        for _ in range(batch * (positions + 1)):
            state = (state * 1664525 + 1013904223) % 2**32
            values.append(state >> 24)
        rows = torch.tensor(values).view(batch, positions + 1)
        yield rows[:, :-1], rows[:, 1:]


def loss_of(config, weights, tokens, targets):
    logits = {'gpt2': gpt2, 'llama': llama}[config['model_type']](config, weights, tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
