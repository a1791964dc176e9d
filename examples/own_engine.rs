//! A layer of one's own before every oracle: plain loops over routed pairs, SwiGLU, given routing.
//!
//! ```text
//! cargo run --release --example own_engine            # every claim holds
//! cargo run --release --example own_engine -- fault   # scores forgotten in dA: which claims notice?
//! ```

use std::borrow::Cow;

use ndarray::{Array1, Array2, Array3, ArrayView2, s};
use sonicmoe::case::{Case, Pairing};
use sonicmoe::engine::*;
use sonicmoe::problem::{Gating, Problem};
use sonicmoe::routing::Routing;
use sonicmoe::verify::examine;
use sonicmoe::{Activation, DType, Error, Result};

struct Mine {
    fault: bool,
}

struct Kept<'p, 'q> {
    fault: bool,
    problem: &'p Problem<'q, f32>,
    h: Array2<f32>,
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn given<'p>(problem: &'p Problem<'_, f32>) -> (&'p Routing, &'p [f32]) {
    match problem.gating() {
        Gating::Given { routing, scores } => (routing, scores),
        Gating::Router(_) => unreachable!("accepts() has refused routers"),
    }
}

/// Row, token, expert and score of every pair.
fn rows<'p>(problem: &'p Problem<'_, f32>) -> impl Iterator<Item = (usize, usize, usize, f32)> + 'p {
    let (routing, scores) = given(problem);
    (0..routing.routed()).map(move |row| {
        let pair = routing.row_pair()[row] as usize;
        (row, routing.pair_token()[pair].index(), routing.pair_expert()[pair].index(), scores[pair])
    })
}

fn activate(h: &[f32]) -> Array1<f32> {
    h.chunks(2).map(|pair| pair[0] * sigmoid(pair[0]) * pair[1]).collect()
}

impl Engine<f32> for Mine {
    fn name(&self) -> Cow<'static, str> {
        "mine".into()
    }

    fn numerics(&self) -> Numerics {
        Numerics {
            storage: DType::F32,
            score: DType::F32,
            accumulator: DType::F32.unit_roundoff(),
            // Every intermediate is an f32 of its own: the op-by-op model covers it.
            rounding: RoundingModel::Eager,
            router: RouterRounding::Score,
            function_ulps: 8.0,
            flushes_denormals: false,
        }
    }

    fn accepts(&self, problem: &Problem<'_, f32>) -> Result<()> {
        if matches!(problem.gating(), Gating::Router(_)) || problem.activation() != Activation::SwiGlu {
            return Err(Error::missing("all but SwiGLU with given routing", "draw such cases"));
        }
        Ok(())
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, f32>, _: Record) -> Result<Forward<'p, f32>> {
        let (n, r) = (problem.n(), problem.routed());
        let (mut h, mut o) = (Array2::zeros((r, 2 * n)), Array2::zeros((problem.t(), problem.d())));
        for (row, token, expert, score) in rows(problem) {
            let mut up = problem.w1().slice(s![expert, .., ..]).dot(&problem.x().row(token));
            problem.b1().iter().for_each(|b1| up += &b1.row(expert));
            let mut y = problem.w2().slice(s![expert, .., ..]).dot(&activate(up.as_slice().unwrap_or(&[])));
            problem.b2().iter().for_each(|b2| y += &b2.row(expert));
            o.row_mut(token).scaled_add(score, &y);
            h.row_mut(row).assign(&up);
        }
        Ok(Forward { o, intermediates: None, pass: Box::new(Kept { fault: self.fault, problem, h }) })
    }
}

impl Pass<f32> for Kept<'_, '_> {
    fn routing(&self) -> &Routing {
        given(self.problem).0
    }

    fn scores(&self) -> Vec<f32> {
        given(self.problem).1.to_vec()
    }

    fn logits(&self) -> Option<ArrayView2<'_, f32>> {
        None
    }

    fn kept(&self) -> Ledger {
        let mut ledger = Ledger::default();
        ledger.keep("x", 4 * self.problem.x().len(), Keeping::Activation);
        ledger.keep("h", 4 * self.h.len(), Keeping::Activation);
        ledger
    }

    fn backward(&self, dout: ArrayView2<'_, f32>, _: Record) -> Result<Backward<f32>> {
        let (p, (routing, _)) = (self.problem, given(self.problem));
        let (t, d, n, e) = (p.t(), p.d(), p.n(), p.e());
        let (mut dx, mut ds) = (Array2::<f32>::zeros((t, d)), vec![0.0; routing.routed()]);
        let (mut dw1, mut dw2) = (Array3::<f32>::zeros((e, 2 * n, d)), Array3::<f32>::zeros((e, d, n)));
        let (mut db1, mut db2) = (Array2::<f32>::zeros((e, 2 * n)), Array2::<f32>::zeros((e, d)));
        for (row, token, expert, score) in rows(p) {
            let (dout, h) = (dout.row(token), self.h.row(row));
            let (w1, w2) = (p.w1(), p.w2());
            let a = activate(h.as_slice().unwrap_or(&[]));
            let g = w2.slice(s![expert, .., ..]).t().dot(&dout);
            let bias = p.b2().map_or(0.0, |b2| dout.dot(&b2.row(expert)));
            ds[routing.row_pair()[row] as usize] = g.dot(&a) + bias;
            let mut dh = Array1::zeros(2 * n);
            for unit in 0..n {
                let (gate, up) = (h[2 * unit], h[2 * unit + 1]);
                let (on, da) = (sigmoid(gate), if self.fault { g[unit] } else { score * g[unit] });
                dh[2 * unit] = da * up * on * (1.0 + gate * (1.0 - on));
                dh[2 * unit + 1] = da * gate * on;
            }
            dx.row_mut(token).scaled_add(1.0, &w1.slice(s![expert, .., ..]).t().dot(&dh));
            let x = p.x();
            for feature in 0..d {
                dw1.slice_mut(s![expert, .., feature]).scaled_add(x[[token, feature]], &dh);
                dw2.slice_mut(s![expert, feature, ..]).scaled_add(score * dout[feature], &a);
            }
            db1.row_mut(expert).scaled_add(1.0, &dh);
            db2.row_mut(expert).scaled_add(score, &dout);
        }
        let with_biases = |gradient| p.b1().is_some().then_some(gradient);
        let (db1, db2) = (with_biases(db1), with_biases(db2));
        Ok(Backward { gradients: Gradients { dx, dw1, dw2, db1, db2, ds, router: None }, intermediates: None })
    }
}

fn main() -> Result<()> {
    let mine = Mine { fault: std::env::args().any(|argument| argument == "fault") };
    let mut wrong = 0;
    for (seed, shape) in ["17,16,24,3,2", "129,40,33,5,2", "64,64,64,4,4"].into_iter().enumerate() {
        let case = Case::new(shape.parse()?).with_biases().with_pairing(Pairing::TopK).with_seed(seed as u64);
        for finding in examine(&mine, &case.problem()?)?.findings {
            let outcome = if finding.failing == 0 { "holds" } else { "FAILS" };
            wrong += finding.failing;
            println!("{outcome}  {shape}  {}  {}", finding.claim.subject, finding.explanation);
        }
    }
    println!("\n{wrong} numbers are wrong");
    Ok(())
}
