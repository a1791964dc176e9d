"""Writes one forward and backward of any MoE layer as a file that `sonicmoe check` reads.

Needs torch and safetensors only. Printed by `sonicmoe dumper`; keep it beside your own code.

    from sonicmoe_dump import dump
    dump("run.safetensors", block, x, k=8, router="topk_over_softmax_renormalized",
         w1_layout="concatenated_gate_first", activation="swiglu", router_w=block.gate.weight,
         w1=[(e.gate_proj.weight, e.up_proj.weight) for e in block.experts],
         w2=[e.down_proj.weight for e in block.experts])
"""

import json

import torch
from safetensors.torch import save_file


def dump(path, moe, x, *, w1, w2, router, activation, k=None, w1_layout=None, b1=None, b2=None, router_w=None,
         router_b=None, token_idx=None, expert_idx=None, scores=None, dout=None, transposed=False, seed=0,
         producer=None, **results):
    """Runs `moe(x)` and its backward once, and writes inputs, results and gradients to `path`.

    moe       any callable from x to o (or to a tuple that starts with o).
    x         (T, d), or any number of axes that end in d. The strides that `moe` sees are those of x.
    w1, b1    the parameters themselves, so that their gradients are found: one tensor (E, 2n, d), or a
    w2, b2    list of one tensor per expert, or for w1 and b1 of one pair (gate, up) per expert.
              transposed=True: weights are stored (E, d, 2n) and (E, n, d).
    router    softmax_over_topk, topk_over_softmax, topk_over_softmax_renormalized, with router_w (E, d),
              router_b (E) and k; or given, with token_idx, expert_idx and scores (R).
    w1_layout interleaved_gate_first, concatenated_gate_first or concatenated_up_first; pairs (gate, up)
              are concatenated_gate_first.
    dout      the gradient of the loss in o; random with `seed` if it is not given.
    results   anything else by the names of `sonicmoe check --help`, such as router_logits or h.
    """
    inputs = {"w1": w1, "w2": w2, "b1": b1, "b2": b2, "router_w": router_w, "router_b": router_b}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    if scores is not None and not scores.requires_grad:
        raise ValueError("scores must require a gradient before they are handed to the layer: ds is a result")
    if w1_layout is None and _has_pairs(w1):
        w1_layout = "concatenated_gate_first"
    leaves = [leaf for value in inputs.values() for leaf in _leaves(value)] + ([] if scores is None else [scores])
    kept = [(leaf, leaf.grad, leaf.requires_grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
        leaf.requires_grad_(True)
    try:
        # preserve_format keeps the strides of a dense tensor; any other is rebuilt with them.
        seen = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        seen = seen.copy_(x.detach()).requires_grad_(True)
        with torch.enable_grad():
            o = moe(seen)
            o = o[0] if isinstance(o, tuple) else o
        if dout is None:
            generator = torch.Generator().manual_seed(seed)
            dout = torch.randn(o.shape, generator=generator, dtype=torch.float32).to(o.dtype).to(o.device)
        o.backward(dout)
        tensors = {"x": _rows(x), "dout": _rows(dout), "o": _rows(o)}
        if seen.grad is not None:
            tensors["dx"] = _rows(seen.grad)
        for name, value in inputs.items():
            turn = transposed and name in ("w1", "w2")
            tensors[name] = _joined(value, lambda leaf: leaf, turn)
            tensors["d" + name] = _joined(value, lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, turn)
        given = {"token_idx": token_idx, "expert_idx": expert_idx, "scores": scores}
        tensors.update({name: value for name, value in given.items() if value is not None})
        if scores is not None:
            tensors["ds"] = torch.zeros_like(scores) if scores.grad is None else scores.grad
    finally:
        for leaf, grad, requires_grad in kept:
            leaf.grad = grad
            leaf.requires_grad_(requires_grad)
    tensors.update(results)
    strides = {name: _strides(value) for name, value in {"x": x, "dout": dout, **inputs}.items()}
    said = {"router": router, "w1_layout": w1_layout, "activation": activation, "K": k, "seed": seed,
            "producer": producer or f"torch {torch.__version__}", "strides": json.dumps(strides)}
    # Copies: safetensors takes neither views of one storage nor strides.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    save_file(tensors, str(path), metadata={key: str(value) for key, value in said.items() if value is not None})


def _has_pairs(value):
    return isinstance(value, (list, tuple)) and isinstance(value[0], (list, tuple))


def _leaves(value):
    """Every parameter inside."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _joined(value, read, turn):
    """One tensor with an axis of experts, from what `read` gives for every parameter."""
    if not isinstance(value, (list, tuple)):
        return read(value).transpose(-1, -2) if turn else read(value)
    experts = []
    for item in value:
        parts = [read(leaf) for leaf in _leaves(item)]
        parts = [part.transpose(-1, -2) for part in parts] if turn else parts
        experts.append(torch.cat(parts, 0))
    return torch.stack(experts)


def _strides(value):
    return [_strides(item) for item in value] if isinstance(value, (list, tuple)) else list(value.stride())


def _rows(value):
    return value.reshape(-1, value.shape[-1])
