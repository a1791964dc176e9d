//! An engine written as plain loops, apart from everything in the crate but the vocabulary: sums in
//! random order, numbers rounded where a model says so. It is correct by its shortness.

use std::cell::RefCell;

use ndarray::{Array1, Array2, Array3};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sonicmoe::engine::{Numerics, Output, Results, RoundingModel, RouterRounding, Stored};
use sonicmoe::routing::{GroupedSigmoid, Routing};
use sonicmoe::{Activation, Convention, DType, Element, Gating, Gelu, Problem, Real, TokenId};

/// Units of the accumulator's roundoff that the elementary functions below may err by: a library
/// function within one ulp (two units), a sum, a quotient.
pub const FUNCTION_ULPS: f64 = 4.0;

/// The engine; `A` is its accumulator.
pub struct Naive {
    pub numerics: Numerics,
    random: RefCell<ChaCha8Rng>,
}

struct Run<'r, A> {
    numerics: Numerics,
    random: &'r RefCell<ChaCha8Rng>,
    problem: &'r Problem<'static, f64>,
    routing: &'r Routing,
    accumulator: std::marker::PhantomData<A>,
}

impl Naive {
    pub fn new(numerics: Numerics, seed: u64) -> Self {
        Self { numerics, random: RefCell::new(ChaCha8Rng::seed_from_u64(seed)) }
    }

    pub fn run<A: Real>(&self, problem: &Problem<'static, f64>, routing: &Routing) -> Results {
        Run::<A> {
            numerics: self.numerics,
            random: &self.random,
            problem,
            routing,
            accumulator: std::marker::PhantomData,
        }
        .results()
    }
}

impl<A: Real> Run<'_, A> {
    fn wide(&self, value: f64) -> A {
        A::from_f64(value)
    }

    /// Every operation's result passes here: with a flush, nothing below the normal range survives.
    fn op(&self, value: A) -> A {
        let tiny = value.to_f64().abs() < A::DTYPE.smallest_normal();
        if self.numerics.flushes_denormals && tiny { A::zero() } else { value }
    }

    fn store(&self, dtype: DType, value: A) -> A {
        let rounded = dtype.round(value.to_f64());
        let tiny = rounded.abs() < dtype.smallest_normal();
        A::from_f64(if self.numerics.flushes_denormals && tiny { 0.0 } else { rounded })
    }

    fn to_storage(&self, value: A) -> A {
        self.store(self.numerics.storage, value)
    }

    fn router_type(&self) -> DType {
        match self.numerics.router {
            RouterRounding::Score => self.numerics.score,
            RouterRounding::TensorType => self.numerics.storage,
        }
    }

    fn to_router(&self, value: A) -> A {
        self.store(self.router_type(), value)
    }

    fn coin(&self) -> bool {
        self.random.borrow_mut().random()
    }

    fn mul(&self, a: A, b: A) -> A {
        self.op(a * b)
    }

    /// A sum in random order over a random tree.
    fn sum(&self, mut terms: Vec<A>) -> A {
        terms.shuffle(&mut *self.random.borrow_mut());
        self.tree(&terms)
    }

    fn tree(&self, terms: &[A]) -> A {
        match terms {
            [] => A::zero(),
            [term] => *term,
            [rest @ .., last] if self.coin() => self.op(self.tree(rest) + *last),
            _ => {
                let middle = self.random.borrow_mut().random_range(1..terms.len());
                let (left, right) = terms.split_at(middle);
                self.op(self.tree(left) + self.tree(right))
            }
        }
    }

    fn dot(&self, factors: impl Iterator<Item = (A, A)>, addend: Option<A>) -> A {
        self.sum(factors.map(|(a, b)| self.mul(a, b)).chain(addend).collect())
    }

    fn sigmoid(&self, x: A) -> A {
        self.op(A::one() / self.op(A::one() + self.op((-x).exp())))
    }

    fn function(&self, f: fn(f64) -> f64, x: A) -> A {
        self.op(A::from_f64(f(x.to_f64())))
    }

    fn tanh_argument(&self, x: A) -> A {
        let cube = self.mul(self.mul(x, x), x);
        let inner = self.op(x + self.mul(self.wide(0.044715), cube));
        self.mul(self.wide((2.0 / std::f64::consts::PI).sqrt()), inner)
    }

    /// f of a = f(gate)·up, as textbooks write it.
    fn curve(&self, x: A) -> A {
        let half = self.wide(0.5);
        match self.problem.activation() {
            Activation::SwiGlu | Activation::Silu => self.mul(x, self.sigmoid(x)),
            Activation::GeGlu(Gelu::Exact) | Activation::Gelu(Gelu::Exact) => {
                let erf = self.function(libm::erf, self.mul(x, self.wide(std::f64::consts::FRAC_1_SQRT_2)));
                self.mul(self.mul(half, x), self.op(A::one() + erf))
            }
            Activation::GeGlu(Gelu::Tanh) | Activation::Gelu(Gelu::Tanh) => {
                let tanh = self.op(self.tanh_argument(x).tanh());
                self.mul(self.mul(half, x), self.op(A::one() + tanh))
            }
            Activation::ReGlu | Activation::Relu => x.max(A::zero()),
            Activation::ReluSquared => self.mul(x.max(A::zero()), x.max(A::zero())),
            Activation::GptOss => {
                let gate = if x > self.wide(7.0) { self.wide(7.0) } else { x };
                self.mul(gate, self.sigmoid(self.mul(self.wide(1.702), gate)))
            }
        }
    }

    fn slope(&self, x: A) -> A {
        let (half, one) = (self.wide(0.5), A::one());
        match self.problem.activation() {
            Activation::SwiGlu | Activation::Silu => {
                let sigma = self.sigmoid(x);
                if self.coin() {
                    self.mul(sigma, self.op(one + self.mul(x, self.op(one - sigma))))
                } else {
                    let silu = self.mul(x, sigma);
                    self.op(self.op(sigma - self.mul(silu, sigma)) + silu)
                }
            }
            Activation::GeGlu(Gelu::Exact) | Activation::Gelu(Gelu::Exact) => {
                let erf = self.function(libm::erf, self.mul(x, self.wide(std::f64::consts::FRAC_1_SQRT_2)));
                let cdf = self.mul(half, self.op(one + erf));
                let pdf = self.op(self.mul(-half, self.mul(x, x)).exp());
                let pdf = self.mul(pdf, self.wide(1.0 / std::f64::consts::TAU.sqrt()));
                self.op(cdf + self.mul(x, pdf))
            }
            Activation::GeGlu(Gelu::Tanh) | Activation::Gelu(Gelu::Tanh) => {
                let tanh = self.op(self.tanh_argument(x).tanh());
                let inner = self.op(one + self.mul(self.wide(3.0 * 0.044715), self.mul(x, x)));
                let slope = self.mul(self.wide((2.0 / std::f64::consts::PI).sqrt()), inner);
                let bend = self.mul(self.op(one - self.mul(tanh, tanh)), slope);
                self.op(self.mul(half, self.op(one + tanh)) + self.mul(self.mul(half, x), bend))
            }
            Activation::ReGlu | Activation::Relu => {
                if x > A::zero() {
                    one
                } else {
                    A::zero()
                }
            }
            Activation::ReluSquared => self.op(x.max(A::zero()) + x.max(A::zero())),
            Activation::GptOss if x > self.wide(7.0) => A::zero(),
            Activation::GptOss => {
                let steep = self.mul(self.wide(1.702), x);
                let sigma = self.sigmoid(steep);
                self.mul(sigma, self.op(one + self.mul(steep, self.op(one - sigma))))
            }
        }
    }

    /// v of a = f(gate)·v(up), and its slope.
    fn of_up(&self, up: A) -> (A, A) {
        let limit = self.wide(7.0);
        match self.problem.activation() {
            Activation::GptOss if up > limit => (self.op(limit + A::one()), A::zero()),
            Activation::GptOss if up < -limit => (self.op(A::one() - limit), A::zero()),
            Activation::GptOss => (self.op(up + A::one()), A::one()),
            _ => (up, A::one()),
        }
    }

    /// gpt-oss as an eager framework runs it: a, and for a gradient of a those of gate and up.
    fn gpt_oss_by_operation(&self, gate: A, up: A, da: A) -> [A; 3] {
        let st = |value| self.to_storage(value);
        let clamped = if gate > self.wide(7.0) { self.wide(7.0) } else { gate };
        let sigma = st(self.sigmoid(st(self.mul(clamped, self.wide(1.702)))));
        let opened = st(self.mul(clamped, sigma));
        let (lifted, passes) = self.of_up(up);
        let lifted = st(lifted);
        let d_opened = st(self.mul(da, lifted));
        let d_sigma = st(self.mul(d_opened, clamped));
        let d_steep = st(self.mul(self.mul(d_sigma, self.op(A::one() - sigma)), sigma));
        let through_sigma = st(self.mul(d_steep, self.wide(1.702)));
        let dgate = st(self.op(st(self.mul(d_opened, sigma)) + through_sigma));
        let dgate = if gate > self.wide(7.0) { A::zero() } else { dgate };
        [st(self.mul(lifted, opened)), dgate, self.mul(st(self.mul(da, opened)), passes)]
    }

    fn gate(&self, h: &Array2<A>, row: usize, unit: usize) -> A {
        if self.problem.activation().gated() { h[[row, 2 * unit]] } else { h[[row, unit]] }
    }

    fn up(&self, h: &Array2<A>, row: usize, unit: usize) -> A {
        if self.problem.activation().gated() { h[[row, 2 * unit + 1]] } else { A::one() }
    }

    fn token(&self, row: usize) -> usize {
        self.routing.row_token()[row].index()
    }

    fn expert(&self, row: usize) -> usize {
        self.routing.pair_expert()[self.routing.row_pair()[row] as usize].index()
    }

    fn rows_of(&self, expert: usize) -> Vec<usize> {
        (0..self.routing.routed()).filter(|&row| self.expert(row) == expert).collect()
    }

    fn results(&self) -> Results {
        let p = self.problem;
        let (t, d, n, e, r, width) = (p.t(), p.d(), p.n(), p.e(), self.routing.routed(), p.h_width());
        let eager = self.numerics.rounding == RoundingModel::Eager;
        let x = p.x().mapv(A::from_f64);
        let dout = p.dout().mapv(A::from_f64);
        let (w1, w2) = (p.w1().mapv(A::from_f64), p.w2().mapv(A::from_f64));
        let (b1, b2) = (p.b1().map(|b1| b1.mapv(A::from_f64)), p.b2().map(|b2| b2.mapv(A::from_f64)));
        let st = |value| self.to_storage(value);

        let (logits, scores) = self.scores(&x);
        let s: Vec<A> = self.routing.to_rows(&scores);

        // Forward.
        let mut h = Array2::from_elem((r, width), A::zero());
        let (mut a, mut y) = (Array2::from_elem((r, n), A::zero()), Array2::from_elem((r, d), A::zero()));
        for row in 0..r {
            let (token, expert) = (self.token(row), self.expert(row));
            let mut wide_h = h.row(row).to_owned().insert_axis(ndarray::Axis(0));
            for c in 0..width {
                let products = (0..d).map(|i| (x[[token, i]], w1[[expert, c, i]]));
                let bias = b1.as_ref().map(|b1| b1[[expert, c]]);
                wide_h[[0, c]] = if eager {
                    let product = st(self.dot(products, None));
                    bias.map_or(product, |bias| st(self.op(product + bias)))
                } else {
                    self.dot(products, bias)
                };
                h[[row, c]] = st(wide_h[[0, c]]);
            }
            let by_operation = eager && p.activation() == Activation::GptOss;
            for j in 0..n {
                let (gate, up) = (self.gate(&wide_h, 0, j), self.up(&wide_h, 0, j));
                if by_operation {
                    [a[[row, j]], ..] = self.gpt_oss_by_operation(h[[row, 2 * j]], h[[row, 2 * j + 1]], A::zero());
                    continue;
                }
                let (up, _) = self.of_up(up);
                a[[row, j]] = match (eager, p.activation().gated()) {
                    (true, true) => st(self.mul(st(self.curve(gate)), up)),
                    (_, false) => st(self.curve(gate)),
                    (false, true) => st(self.mul(self.curve(gate), up)),
                };
            }
            for i in 0..d {
                let products = (0..n).map(|j| (a[[row, j]], w2[[expert, i, j]]));
                let bias = b2.as_ref().map(|b2| b2[[expert, i]]);
                y[[row, i]] = if eager {
                    let product = st(self.dot(products, None));
                    bias.map_or(product, |bias| st(self.op(product + bias)))
                } else {
                    st(self.dot(products, bias))
                };
            }
        }
        let mut o = Array2::from_elem((t, d), A::zero());
        for token in 0..t {
            let rows = self.routing.rows_of_token(TokenId(token as u32));
            for i in 0..d {
                let terms = rows.iter().map(|&row| (s[row as usize], y[[row as usize, i]]));
                o[[token, i]] = if eager {
                    self.partial_sums(terms.map(|(s, y)| st(self.mul(s, y))).collect())
                } else {
                    st(self.dot(terms, None))
                };
            }
        }

        // Backward.
        let mut dh = Array2::from_elem((r, width), A::zero());
        let (mut a_prime, mut dx_expanded) =
            (Array2::from_elem((r, n), A::zero()), Array2::from_elem((r, d), A::zero()));
        let mut ds_rows = vec![A::zero(); r];
        let dy = |row: usize, i: usize| {
            let product = self.mul(s[row], dout[[self.token(row), i]]);
            if eager { st(product) } else { product }
        };
        for row in 0..r {
            let (token, expert) = (self.token(row), self.expert(row));
            let mut terms = Vec::new();
            for j in 0..n {
                let (gate, up) = (self.gate(&h, row, j), self.up(&h, row, j));
                let (of_gate, slope) = (self.curve(gate), self.slope(gate));
                if eager {
                    let da = st(self.dot((0..d).map(|i| (dy(row, i), w2[[expert, i, j]])), None));
                    if p.activation() == Activation::GptOss {
                        [_, dh[[row, 2 * j]], dh[[row, 2 * j + 1]]] = self.gpt_oss_by_operation(gate, up, da);
                    } else if p.activation().gated() {
                        dh[[row, 2 * j]] = st(self.mul(st(self.mul(da, up)), slope));
                        dh[[row, 2 * j + 1]] = st(self.mul(da, st(of_gate)));
                    } else {
                        dh[[row, j]] = st(self.mul(da, slope));
                    }
                } else {
                    let g = self.dot((0..d).map(|i| (dout[[token, i]], w2[[expert, i, j]])), None);
                    let (up, passes) = self.of_up(up);
                    let wide_a = if p.activation().gated() { self.mul(of_gate, up) } else { of_gate };
                    terms.push(self.mul(g, wide_a));
                    a_prime[[row, j]] = st(self.mul(s[row], wide_a));
                    let da = self.mul(s[row], g);
                    if p.activation().gated() {
                        let first = self.coin();
                        let product =
                            if first { self.mul(self.mul(da, up), slope) } else { self.mul(da, self.mul(up, slope)) };
                        dh[[row, 2 * j]] = st(product);
                        dh[[row, 2 * j + 1]] = st(self.mul(self.mul(da, of_gate), passes));
                    } else {
                        dh[[row, j]] = st(self.mul(da, slope));
                    }
                }
            }
            if eager {
                terms = (0..d).map(|i| st(self.mul(dout[[token, i]], y[[row, i]]))).collect();
            } else if let Some(b2) = &b2 {
                terms.extend((0..d).map(|i| self.mul(dout[[token, i]], b2[[expert, i]])));
            }
            ds_rows[row] = self.to_router(self.sum(terms));
            for i in 0..d {
                dx_expanded[[row, i]] = st(self.dot((0..width).map(|c| (dh[[row, c]], w1[[expert, c, i]])), None));
            }
        }
        let ds = self.routing.to_pairs(&ds_rows);

        let mut dw1 = Array3::from_elem((e, width, d), A::zero());
        let mut dw2 = Array3::from_elem((e, d, n), A::zero());
        let (mut db1, mut db2) = (Array2::from_elem((e, width), A::zero()), Array2::from_elem((e, d), A::zero()));
        for expert in 0..e {
            let rows = self.rows_of(expert);
            for c in 0..width {
                for i in 0..d {
                    let terms = rows.iter().map(|&row| (dh[[row, c]], x[[self.token(row), i]]));
                    dw1[[expert, c, i]] = st(self.dot(terms, None));
                }
                db1[[expert, c]] = st(self.sum(rows.iter().map(|&row| dh[[row, c]]).collect()));
            }
            for i in 0..d {
                for j in 0..n {
                    let terms = rows.iter().map(|&row| {
                        if eager { (dy(row, i), a[[row, j]]) } else { (dout[[self.token(row), i]], a_prime[[row, j]]) }
                    });
                    dw2[[expert, i, j]] = st(self.dot(terms, None));
                }
                db2[[expert, i]] = st(self.sum(rows.iter().map(|&row| dy(row, i)).collect()));
            }
        }

        let mut dx = Array2::from_elem((t, d), A::zero());
        for token in 0..t {
            let rows = self.routing.rows_of_token(TokenId(token as u32));
            for i in 0..d {
                let terms = rows.iter().map(|&row| dx_expanded[[row as usize, i]]).collect();
                dx[[token, i]] = if eager { self.partial_sums(terms) } else { st(self.sum(terms)) };
            }
        }

        let score_type = self.router_type();
        let mut results = Results::new();
        let mut put = |output, dtype, values: ndarray::ArrayD<A>| {
            results.insert(output, Stored { dtype, values: values.mapv(Element::to_f64) });
        };
        if let (Gating::Router(router), Some(logits)) = (p.gating(), &logits) {
            let dlogits = self.dlogits(router.convention, logits, &scores, &ds);
            let w = router.w.mapv(A::from_f64);
            for token in 0..t {
                for i in 0..d {
                    let part = self.dot((0..e).map(|expert| (dlogits[[token, expert]], w[[expert, i]])), None);
                    dx[[token, i]] = st(self.op(dx[[token, i]] + self.to_router(part)));
                }
            }
            let drouter_w = Array2::from_shape_fn((e, d), |(expert, i)| {
                st(self.dot((0..t).map(|token| (dlogits[[token, expert]], x[[token, i]])), None))
            });
            put(Output::DrouterW, self.numerics.storage, drouter_w.into_dyn());
            if router.b.is_some() {
                let drouter_b = Array1::from_shape_fn(e, |expert| st(self.sum(dlogits.column(expert).to_vec())));
                put(Output::DrouterB, self.numerics.storage, drouter_b.into_dyn());
            }
            put(Output::Dlogits, score_type, dlogits.into_dyn());
            put(Output::Logits, score_type, logits.clone().into_dyn());
            put(Output::Scores, score_type, Array1::from(scores).into_dyn());
        }
        let storage = self.numerics.storage;
        if b1.is_some() {
            put(Output::Db1, storage, db1.into_dyn());
            put(Output::Db2, storage, db2.into_dyn());
        }
        if !eager {
            put(Output::APrime, storage, a_prime.into_dyn());
        }
        put(Output::Ds, score_type, Array1::from(ds).into_dyn());
        for (output, values) in [
            (Output::O, o.into_dyn()),
            (Output::Dx, dx.into_dyn()),
            (Output::Dw1, dw1.into_dyn()),
            (Output::Dw2, dw2.into_dyn()),
            (Output::H, h.into_dyn()),
            (Output::A, a.into_dyn()),
            (Output::Y, y.into_dyn()),
            (Output::Dh, dh.into_dyn()),
            (Output::DxExpanded, dx_expanded.into_dyn()),
        ] {
            put(output, storage, values);
        }
        results
    }

    /// Terms added one after the other in random order, each partial sum stored.
    fn partial_sums(&self, mut terms: Vec<A>) -> A {
        terms.shuffle(&mut *self.random.borrow_mut());
        terms.into_iter().reduce(|sum, term| self.to_storage(self.op(sum + term))).unwrap_or(A::zero())
    }

    fn softmax(&self, logits: &[A]) -> Vec<A> {
        let largest = logits.iter().copied().fold(A::neg_infinity(), A::max);
        let weights: Vec<A> = logits.iter().map(|&logit| self.op(self.op(logit - largest).exp())).collect();
        let total = self.sum(weights.clone());
        weights.into_iter().map(|weight| self.op(weight / total)).collect()
    }

    fn pairs_of(&self, token: usize) -> Vec<usize> {
        let rows = self.routing.rows_of_token(TokenId(token as u32));
        rows.iter().map(|&row| self.routing.row_pair()[row as usize] as usize).collect()
    }

    fn scores(&self, x: &Array2<A>) -> (Option<Array2<A>>, Vec<A>) {
        let p = self.problem;
        let router = match p.gating() {
            Gating::Given { scores, .. } => return (None, scores.iter().map(|&score| self.wide(score)).collect()),
            Gating::Router(router) => router,
        };
        let logits = Array2::from_shape_fn((p.t(), p.e()), |(token, expert)| {
            let products = (0..p.d()).map(|i| (x[[token, i]], self.wide(router.w[[expert, i]])));
            self.to_router(self.dot(products, router.b.as_ref().map(|b| self.wide(b[expert]))))
        });
        let mut scores = vec![A::zero(); self.routing.routed()];
        for token in 0..p.t() {
            let pairs = self.pairs_of(token);
            let experts: Vec<usize> = pairs.iter().map(|&pair| self.routing.pair_expert()[pair].index()).collect();
            let chosen = match router.convention {
                Convention::SoftmaxOverTopK => {
                    self.softmax(&experts.iter().map(|&expert| logits[[token, expert]]).collect::<Vec<_>>())
                }
                Convention::TopKOverSoftmax | Convention::TopKOverSoftmaxRenormalized => {
                    let p = self.softmax(&logits.row(token).to_vec());
                    experts.iter().map(|&expert| self.to_router(p[expert])).collect()
                }
                Convention::GroupedSigmoid(_) => {
                    experts.iter().map(|&expert| self.to_router(self.sigmoid(logits[[token, expert]]))).collect()
                }
            };
            let (total, factor) = match router.convention {
                Convention::TopKOverSoftmaxRenormalized => (self.to_router(self.sum(chosen.clone())), A::one()),
                Convention::GroupedSigmoid(router) => {
                    (self.total_of_sigmoids(&router, &chosen), self.wide(router.factor))
                }
                _ => (A::one(), A::one()),
            };
            for (pair, score) in pairs.into_iter().zip(chosen) {
                let share = self.op(score / total);
                scores[pair] = match router.convention {
                    Convention::GroupedSigmoid(_) => self.to_router(self.mul(self.to_router(share), factor)),
                    _ => self.to_router(share),
                };
            }
        }
        (Some(logits), scores)
    }

    /// S = Σp + 1e-20, or 1.
    fn total_of_sigmoids(&self, router: &GroupedSigmoid, p: &[A]) -> A {
        if router.renormalized {
            let sum = self.to_router(self.sum(p.to_vec()));
            self.to_router(self.op(sum + self.wide(1e-20)))
        } else {
            A::one()
        }
    }

    /// The gradients of the logits of one token's pairs: op by op, or by the closed form.
    fn backward_of_sigmoids(&self, router: &GroupedSigmoid, logits: &[A], g: &[A]) -> Vec<A> {
        let rt = |value| self.to_router(value);
        let p: Vec<A> = logits.iter().map(|&logit| rt(self.sigmoid(logit))).collect();
        let (total, factor) = (self.total_of_sigmoids(router, &p), self.wide(router.factor));
        let shares: Vec<A> = p.iter().map(|&p| self.op(p / total)).collect();
        let bend = |p: A| self.mul(p, self.op(A::one() - p));
        if self.coin() {
            let mean = if router.renormalized { self.dot(g.iter().copied().zip(shares), None) } else { A::zero() };
            let dp = g.iter().map(|&g| self.mul(factor, self.op(self.op(g - mean) / total)));
            return dp.zip(&p).map(|(dp, &p)| rt(self.mul(dp, bend(p)))).collect();
        }
        let g: Vec<A> = g.iter().map(|&g| rt(self.mul(g, factor))).collect();
        let through_total =
            g.iter().zip(&shares).map(|(&g, &share)| rt(self.mul(g, rt(self.op(rt(share) / total))))).collect();
        let shift = if router.renormalized { rt(self.sum(through_total)) } else { A::zero() };
        let dp = g.iter().map(|&g| rt(self.op(rt(self.op(g / total)) - shift)));
        dp.zip(&p).map(|(dp, &p)| rt(self.mul(dp, bend(p)))).collect()
    }

    fn dlogits(&self, convention: Convention, logits: &Array2<A>, scores: &[A], ds: &[A]) -> Array2<A> {
        let (t, e) = logits.dim();
        let rt = |value| self.to_router(value);
        let mut dlogits = Array2::from_elem((t, e), A::zero());
        for token in 0..t {
            let pairs = self.pairs_of(token);
            let experts: Vec<usize> = pairs.iter().map(|&pair| self.routing.pair_expert()[pair].index()).collect();
            if let Convention::GroupedSigmoid(router) = convention {
                let chosen: Vec<A> = experts.iter().map(|&expert| logits[[token, expert]]).collect();
                let g: Vec<A> = pairs.iter().map(|&pair| ds[pair]).collect();
                for (&expert, dlogit) in experts.iter().zip(self.backward_of_sigmoids(&router, &chosen, &g)) {
                    dlogits[[token, expert]] = dlogit;
                }
                continue;
            }
            let by_operation = convention == Convention::TopKOverSoftmaxRenormalized && self.coin();
            if convention == Convention::TopKOverSoftmax || by_operation {
                let p: Vec<A> = self.softmax(&logits.row(token).to_vec()).into_iter().map(rt).collect();
                let mut g = vec![A::zero(); e];
                if by_operation {
                    let total = rt(self.sum(experts.iter().map(|&expert| p[expert]).collect()));
                    let shares = pairs.iter().map(|&pair| rt(self.mul(ds[pair], rt(self.op(scores[pair] / total)))));
                    let shift = rt(self.sum(shares.collect()));
                    for (&pair, &expert) in pairs.iter().zip(&experts) {
                        g[expert] = rt(self.op(rt(self.op(ds[pair] / total)) - shift));
                    }
                } else {
                    for (&pair, &expert) in pairs.iter().zip(&experts) {
                        g[expert] = ds[pair];
                    }
                }
                let mean = self.dot(experts.iter().map(|&expert| (g[expert], p[expert])), None);
                for expert in 0..e {
                    dlogits[[token, expert]] = rt(self.mul(p[expert], self.op(g[expert] - mean)));
                }
            } else {
                let mean = self.dot(pairs.iter().map(|&pair| (ds[pair], scores[pair])), None);
                for (&pair, &expert) in pairs.iter().zip(&experts) {
                    dlogits[[token, expert]] = rt(self.mul(scores[pair], self.op(ds[pair] - mean)));
                }
            }
        }
        dlogits
    }
}
