//! A run in PyTorch, written by the helper that `dumper` prints, passes; where there is no PyTorch
//! the claim is skipped, and says so.

use std::path::{Path, PathBuf};
use std::process::Command;

use sonicmoe::cli::check::{CheckArgs, check_file};
use sonicmoe::dump::{Dump, Overrides};
use sonicmoe::oracle::Verdict;

/// A Python that has torch and safetensors: `SONICMOE_PYTHON`, or one on the path.
fn python() -> Option<PathBuf> {
    let named = std::env::var_os("SONICMOE_PYTHON").map(PathBuf::from);
    let usual = ["python3", "/usr/bin/python3"].map(PathBuf::from);
    named.into_iter().chain(usual).find(|python| {
        let probe = Command::new(python).args(["-c", "import torch, safetensors.torch"]).output();
        probe.is_ok_and(|probe| probe.status.success())
    })
}

/// Layers in the plainest PyTorch: one loop over experts.
const LAYERS: &str = r#"
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.nn.functional as F
from sonicmoe_dump import dump

folder = sys.argv[1]
torch.manual_seed(3)
T, d, n, E, K = 33, 24, 16, 5, 2

class Layer(torch.nn.Module):
    def __init__(self, dtype, renormalized):
        super().__init__()
        self.renormalized = renormalized
        self.gate = torch.nn.Linear(d, E, bias=False)
        self.experts = torch.nn.ModuleList()
        for _ in range(E):
            expert = torch.nn.Module()
            expert.gate, expert.up = torch.nn.Linear(d, n, bias=False), torch.nn.Linear(d, n, bias=False)
            expert.down = torch.nn.Linear(n, d, bias=False)
            self.experts.append(expert)
        self.to(dtype)

    def forward(self, x):
        rows = x.reshape(-1, d)
        p = F.softmax(self.gate(rows), dim=-1, dtype=torch.float)
        scores, ids = torch.topk(p, K, dim=-1)
        if self.renormalized:
            scores = scores / scores.sum(-1, keepdim=True)
        scores = scores.to(rows.dtype)
        o = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, rank = torch.where(ids == e)
            a = F.silu(expert.gate(rows[token])) * expert.up(rows[token])
            o = o.index_add(0, token, expert.down(a) * scores[token, rank, None])
        return o.reshape(x.shape), p

for name, dtype, renormalized in [("f32", torch.float32, True), ("bf16", torch.bfloat16, False)]:
    layer = Layer(dtype, renormalized)
    router = "topk_over_softmax_renormalized" if renormalized else "topk_over_softmax"
    # A view with strides: every second row of a larger tensor.
    x = torch.randn(2 * T, d, dtype=torch.float32).to(dtype)[::2]
    dump(f"{folder}/{name}.safetensors", layer, x, k=K, router=router, activation="swiglu",
         router_w=layer.gate.weight, w1=[(e.gate.weight, e.up.weight) for e in layer.experts],
         w2=[e.down.weight for e in layer.experts])
    assert layer.gate.weight.grad is None

# Whole tensors, transposed and with biases, behind given pairs.
w1, w2 = torch.randn(E, d, 2 * n) / d**0.5, torch.randn(E, n, d) / n**0.5
b1, b2 = 0.1 * torch.randn(E, 2 * n), 0.1 * torch.randn(E, d)
token = torch.arange(T).repeat_interleave(K)
expert = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).reshape(-1)
scores = torch.rand(T * K, requires_grad=True)

def given(x):
    h = torch.einsum("rd,rdh->rh", x[token], w1[expert]) + b1[expert]
    y = torch.einsum("rn,rnd->rd", F.silu(h[:, :n]) * h[:, n:], w2[expert]) + b2[expert]
    return torch.zeros_like(x).index_add(0, token, y * scores[:, None])

dump(f"{folder}/given.safetensors", given, torch.randn(T, d), router="given", w1_layout="concatenated_gate_first",
     activation="swiglu", w1=w1, w2=w2, b1=b1, b2=b2, token_idx=token, expert_idx=expert, scores=scores,
     transposed=True)
"#;

/// The parts of transformers that the README's lines use, by its names and with its layouts: gate_up_proj
/// (E, 2n, d), gate first, down_proj (E, d, n), gate.weight (E, d).
const STAND_IN: &str = r#"
import torch
import torch.nn.functional as F

class Qwen3MoeConfig:
    def __init__(self, **sizes):
        self.__dict__.update(sizes)

class Qwen3MoeTopKRouter(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x):
        logits = F.linear(x, self.weight)
        scores, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), self.config.num_experts_per_tok, dim=-1)
        if self.config.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        return logits, scores.to(logits.dtype), ids

class Qwen3MoeExperts(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        E, n, d = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = torch.nn.Parameter(torch.empty(E, 2 * n, d))
        self.down_proj = torch.nn.Parameter(torch.empty(E, d, n))

    def forward(self, x, ids, scores):
        o = torch.zeros_like(x)
        for e in range(len(self.gate_up_proj)):
            token, rank = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up_proj[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[e]) * scores[token, rank, None]
            o = o.index_add(0, token, y)
        return o

class Qwen3MoeSparseMoeBlock(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.experts, self.gate = Qwen3MoeExperts(config), Qwen3MoeTopKRouter(config)

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, scores, ids = self.gate(rows)
        return self.experts(rows, ids, scores).reshape(x.shape)
"#;

fn helper_in(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let helper = Command::new(env!("CARGO_BIN_EXE_sonicmoe")).arg("dumper").output().unwrap();
    std::fs::write(folder.join("sonicmoe_dump.py"), helper.stdout).unwrap();
}

/// Not captured: a skipped claim is never a silent one.
fn skipped(name: &str) {
    eprintln!("skipped: {name}: no python3 has torch and safetensors");
}

#[test]
fn the_readmes_lines_for_a_hugging_face_block_write_a_run_that_passes() {
    let readme = include_str!("../../README.md").split("```python\n");
    let lines: Vec<&str> = readme.filter_map(|rest| rest.split("```").next()).collect();
    let lines = lines.into_iter().find(|lines| lines.contains("from transformers")).unwrap();
    assert_eq!(lines.lines().count(), 10);
    let Some(python) = python() else {
        return skipped("the_readmes_lines_for_a_hugging_face_block_write_a_run_that_passes");
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hugging_face");
    helper_in(&folder);
    let package = folder.join("transformers");
    let model = package.join("models").join("qwen3_moe");
    std::fs::create_dir_all(&model).unwrap();
    std::fs::write(model.join("modeling_qwen3_moe.py"), STAND_IN).unwrap();
    std::fs::write(package.join("__init__.py"), "from .models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig\n")
        .unwrap();
    let lines = format!("import torch; torch.manual_seed(3)\n{lines}");
    let run = Command::new(python).current_dir(&folder).args(["-c", &lines]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let checked = check_file(&folder.join("run.safetensors"), &CheckArgs::default()).unwrap();
    assert!(checked.verdict == Verdict::Pass && checked.missing.is_empty(), "{}", checked.report());
}

#[test]
fn runs_that_the_helper_writes_from_pytorch_pass() {
    let Some(python) = python() else {
        return skipped("runs_that_the_helper_writes_from_pytorch_pass");
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dumper");
    helper_in(&folder);
    let run = Command::new(python).args(["-c", LAYERS]).arg(&folder).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for name in ["f32", "bf16", "given"] {
        let path = folder.join(name).with_extension("safetensors");
        let checked = check_file(&path, &CheckArgs::default()).unwrap();
        // The eager bound of a bf16 dx lets impostors pass; a number may not be wrong.
        let right =
            if name == "bf16" { checked.verdict != Verdict::NumericFailure } else { checked.verdict == Verdict::Pass };
        assert!(right && checked.missing.is_empty(), "{}", checked.report());
    }
    let bytes = std::fs::read(folder.join("f32.safetensors")).unwrap();
    let header = String::from_utf8_lossy(&bytes[8..2000]).into_owned();
    assert!(header.contains("strides") && header.contains(r#"\"x\": [48, 1]"#), "{header}");
    assert!(Dump::read(folder.join("given.safetensors"), &Overrides::default()).unwrap().unused.is_empty());
}
