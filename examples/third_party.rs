//! Somebody else's layer before the whole suite: every oracle, the exact regime, the laws, the museum.
//!
//! ```text
//! cargo run --release --example third_party
//! ```

use ndarray::{Array, Array1, ArrayView2, Axis, s};
use sonicmoe::engine::{Gradients, Numerics, RoundingModel, RouterRounding};
use sonicmoe::verify::{FunctionEngine, Report, suite};
use sonicmoe::{Activation, DType, Error, Gating, Problem, Result};

/// SwiGLU without biases, pair by pair, in f32.
fn moe(p: &Problem<'_, f32>, dout: ArrayView2<'_, f32>) -> Result<(ndarray::Array2<f32>, Gradients<f32>)> {
    let Gating::Given { routing, scores } = p.gating() else { return Err(Error::internal("refused before")) };
    let (mut o, mut dx) = (Array::zeros(p.x().raw_dim()), Array::zeros(p.x().raw_dim()));
    let (mut dw1, mut dw2) = (Array::zeros(p.w1().raw_dim()), Array::zeros(p.w2().raw_dim()));
    let mut ds = vec![0.0; scores.len()];
    for (pair, &score) in scores.iter().enumerate() {
        let (token, expert) = (routing.pair_token()[pair].index(), routing.pair_expert()[pair].index());
        let (w1, w2) = (p.w1().index_axis_move(Axis(0), expert), p.w2().index_axis_move(Axis(0), expert));
        let (x, dout) = (p.x().row(token).to_owned(), dout.row(token).to_owned());
        let h = w1.dot(&x);
        let (gate, up) = (h.slice(s![..;2]), h.slice(s![1..;2]));
        let on = gate.mapv(|gate: f32| 1.0 / (1.0 + (-gate).exp()));
        let silu = &gate * &on;
        let a = &silu * &up;
        o.row_mut(token).scaled_add(score, &w2.dot(&a));

        let g = w2.t().dot(&dout);
        ds[pair] = g.dot(&a);
        let slope = &on * (1.0 + &gate * (1.0 - &on));
        let mut dh = Array1::zeros(h.len());
        dh.slice_mut(s![..;2]).assign(&(&g * &up * &slope * score));
        dh.slice_mut(s![1..;2]).assign(&(&g * &silu * score));
        dx.row_mut(token).scaled_add(1.0, &w1.t().dot(&dh));
        let outer = |left: Array1<f32>, right: Array1<f32>| left.insert_axis(Axis(1)).dot(&right.insert_axis(Axis(0)));
        dw1.index_axis_mut(Axis(0), expert).scaled_add(1.0, &outer(dh, x));
        dw2.index_axis_mut(Axis(0), expert).scaled_add(score, &outer(dout, a));
    }
    Ok((o, Gradients { dx, dw1, dw2, db1: None, db2: None, ds, router: None }))
}

/// What the suite makes of it.
pub fn report() -> Result<Report> {
    let (u, rounding, router) = (DType::F32.unit_roundoff(), RoundingModel::Fused, RouterRounding::Score);
    let (storage, score) = (DType::F32, DType::F32);
    let numerics =
        Numerics { storage, score, accumulator: u, rounding, router, function_ulps: 8.0, flushes_denormals: false };
    let accepts = |p: &Problem<'_, f32>| match (p.activation(), p.b1()) {
        (Activation::SwiGlu, None) => Ok(()),
        (other, _) => Err(Error::unknown("kind of layer", other.name(), ["swiglu without biases"])),
    };
    suite(&FunctionEngine { name: "third party", numerics, accepts, layer: moe })
}

fn main() -> Result<()> {
    report().map(|report| println!("{report}"))
}
