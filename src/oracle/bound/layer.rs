//! The kernels one after the other, expert by expert, as several arithmetics have them.
//!
//! The arithmetics share their midpoints, so one more costs its radii alone. No array by row is held
//! beyond its expert unless it is asked for: y and dx̃ are added to their tokens as they come.

use std::collections::BTreeMap;
use std::ops::Range;

use ndarray::{Array2, ArrayD, ArrayViewMut2, Axis, Zip};
use rayon::prelude::*;

use super::ball::{Arithmetic, Ball, Measure, Sum};
use super::matrix::Balls2;
use super::midpoints::Midpoints;
use super::{Model, eager, fused};
use crate::engine::{Output, RoundingModel};
use crate::error::{Error, Result};
use crate::shape::ExpertId;

/// Which results are asked for; those that they need are computed too.
pub type Keep<'k> = &'k (dyn Fn(Output) -> bool + Sync);

/// Truths, and the radii of each arithmetic.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) truths: BTreeMap<Output, ArrayD<f64>>,
    pub(crate) radii: Vec<BTreeMap<Output, ArrayD<f64>>>,
}

/// What the kernels give to the router, as one arithmetic has it: o and the experts' dx where they are
/// asked for, ds by row.
pub(super) struct Kernels {
    pub(super) o: Option<Balls2>,
    pub(super) dx: Option<Balls2>,
    pub(super) ds: Vec<Ball>,
}

/// What one expert's kernels give, as one arithmetic has it; by row of the expert, or its own gradients.
struct OfExpert {
    results: BTreeMap<Output, Balls2>,
    y: Option<Balls2>,
    dx_expanded: Option<Balls2>,
}

/// All kernels of the layer with scores by row, as `models` have them: of one problem, routing and rounding
/// model, and different arithmetics. What `keep` names goes to `found`.
pub(super) fn kernels(
    models: &[Model<'_, '_>],
    scores: &[Vec<Ball>],
    keep: Keep<'_>,
    found: &mut Found,
) -> Result<Vec<Kernels>> {
    let Some(first) = models.first() else { return Ok(Vec::new()) };
    let (problem, routing) = (first.problem, first.routing);
    let mut stores = stores(first, models.len(), keep);
    let mut o = keep(Output::O).then(|| models.iter().map(Sums::new).collect::<Vec<_>>());
    let mut dx = keep(Output::Dx).then(|| models.iter().map(Sums::new).collect::<Vec<_>>());
    {
        let mut experts = places(&mut stores, routing.experts());
        let at_once = 2 * rayon::current_num_threads();
        while !experts.is_empty() {
            let block: Vec<_> = experts.drain(..experts.len().min(at_once)).collect();
            let computed: Vec<_> = block
                .into_par_iter()
                .filter(|(expert, _)| !routing.rows_of_expert(*expert).is_empty())
                .map(|(expert, places)| (expert, of_expert(models, scores, expert, keep, places)))
                .collect();
            // In the order of the experts, whatever the number of threads.
            rayon::join(
                || each(&mut o, |lane, sums| sums.add_all(&models[lane], Some(&scores[lane]), lane, &computed)),
                || each(&mut dx, |lane, sums| sums.add_all(&models[lane], None, lane, &computed)),
            );
        }
    }
    found.radii.resize_with(models.len(), BTreeMap::new);
    let mut ds = Vec::new();
    for Store { output, shape, arrays, .. } in stores {
        let mut arrays = arrays.into_iter();
        let truth = arrays.next().unwrap_or_default();
        if output == Output::Ds {
            let balls = |rad: Array2<f64>| truth.iter().zip(rad).map(|(&mid, rad)| Ball { mid, rad }).collect();
            ds = arrays.map(balls).collect();
            continue;
        }
        let shaped = |array: Array2<f64>| {
            array.into_shape_with_order(shape.as_slice()).map_err(|error| Error::internal(error.to_string()))
        };
        for (radii, array) in found.radii.iter_mut().zip(arrays) {
            radii.insert(output, shaped(array)?);
        }
        found.truths.insert(output, shaped(truth)?);
    }
    let finished = |sums: &mut Option<Vec<Sums>>, weighted: bool| -> Vec<Option<Balls2>> {
        match sums.take() {
            Some(sums) => {
                sums.into_iter().zip(models).map(|(sums, model)| Some(sums.finish(model, weighted))).collect()
            }
            None => models.iter().map(|_| None).collect(),
        }
    };
    let (o, dx) = (finished(&mut o, true), finished(&mut dx, false));
    debug_assert_eq!(problem.t(), routing.tokens());
    Ok(o.into_iter().zip(dx).zip(ds).map(|((o, dx), ds)| Kernels { o, dx, ds }).collect())
}

fn each(sums: &mut Option<Vec<Sums>>, mut add: impl FnMut(usize, &mut Sums)) {
    sums.iter_mut().flatten().enumerate().for_each(|(lane, sums)| add(lane, sums));
}

/// A result, its truth first and then the radii: the rows of one expert after those of another.
struct Store {
    output: Output,
    shape: Vec<usize>,
    /// Where each expert's rows begin, and where they end.
    offsets: Vec<usize>,
    arrays: Vec<Array2<f64>>,
}

fn stores(model: &Model<'_, '_>, lanes: usize, keep: Keep<'_>) -> Vec<Store> {
    let (problem, routing) = (model.problem, model.routing);
    let (d, n, e, width, r) = (problem.d(), problem.n(), problem.e(), problem.h_width(), routing.routed());
    let biases = problem.b1().is_some();
    let of_rows: Vec<usize> = routing.expert_offsets().iter().map(|&offset| offset as usize).collect();
    let of_experts = |rows: usize| (0..=e).map(|expert| expert * rows).collect::<Vec<_>>();
    let shapes = [
        (Output::H, of_rows.clone(), vec![r, width]),
        (Output::A, of_rows.clone(), vec![r, n]),
        (Output::Y, of_rows.clone(), vec![r, d]),
        (Output::Dh, of_rows.clone(), vec![r, width]),
        (Output::APrime, of_rows.clone(), vec![r, n]),
        (Output::DxExpanded, of_rows.clone(), vec![r, d]),
        (Output::Dw1, of_experts(width), vec![e, width, d]),
        (Output::Dw2, of_experts(d), vec![e, d, n]),
        (Output::Db1, of_experts(1), vec![e, width]),
        (Output::Db2, of_experts(1), vec![e, d]),
        (Output::Ds, of_rows, vec![r, 1]),
    ];
    let there = |output: Output| match output {
        // The router's part of everything stands on it.
        Output::Ds => true,
        Output::Db1 | Output::Db2 => biases && keep(output),
        Output::APrime => model.rounding == RoundingModel::Fused && keep(output),
        _ => keep(output),
    };
    let stores = shapes.into_iter().filter(|(output, ..)| there(*output)).map(|(output, offsets, shape)| {
        let dim = (offsets.last().copied().unwrap_or(0), shape.last().copied().unwrap_or(0));
        Store { output, shape, offsets, arrays: (0..=lanes).map(|_| Array2::zeros(dim)).collect() }
    });
    stores.collect()
}

/// Where one expert's part of each result goes: truth and radii.
type Places<'s> = BTreeMap<Output, Vec<ArrayViewMut2<'s, f64>>>;

fn places(stores: &mut [Store], experts: usize) -> Vec<(ExpertId, Places<'_>)> {
    let mut places: Vec<_> = (0..experts).map(|expert| (ExpertId(expert as u32), Places::new())).collect();
    for Store { output, offsets, arrays, .. } in stores {
        for array in arrays {
            let mut rest = array.view_mut();
            for ((_, places), ends) in places.iter_mut().zip(offsets.windows(2)) {
                let (here, after) = rest.split_at(Axis(0), ends[1] - ends[0]);
                places.entry(*output).or_default().push(here);
                rest = after;
            }
        }
    }
    places
}

/// y and dx̃ of one expert, as each arithmetic has them.
type Expanded = Vec<[Option<Balls2>; 2]>;

fn of_expert(
    models: &[Model<'_, '_>],
    scores: &[Vec<Ball>],
    expert: ExpertId,
    keep: Keep<'_>,
    mut places: Places<'_>,
) -> Expanded {
    let known = Midpoints::shared_by(models.len());
    let mut expanded = Vec::with_capacity(models.len());
    for (lane, (model, scores)) in models.iter().zip(scores).enumerate() {
        let s = &scores[model.routing.rows_of_expert(expert)];
        let OfExpert { results, y, dx_expanded } = match model.rounding {
            RoundingModel::Fused => fused_expert(model, &known, expert, s, keep),
            RoundingModel::Eager => eager_expert(model, &known, expert, s, keep),
        };
        let expanding = [(Output::Y, &y), (Output::DxExpanded, &dx_expanded)];
        let expanding = expanding.into_iter().filter_map(|(output, balls)| Some((output, balls.as_ref()?)));
        for (output, balls) in results.iter().map(|(output, balls)| (*output, balls)).chain(expanding) {
            let Some(places) = places.get_mut(&output) else { continue };
            if lane == 0 {
                places[0].assign(&balls.mid);
            }
            if model.arithmetic.measure != Measure::Midpoint {
                places[1 + lane].assign(&balls.rad);
            }
        }
        expanded.push([y.filter(|_| keep(Output::O)), dx_expanded.filter(|_| keep(Output::Dx))]);
    }
    expanded
}

fn column(balls: Vec<Ball>) -> Balls2 {
    Balls2::from_fn(balls.len(), 1, |row, _| balls[row])
}

fn row(balls: Vec<Ball>) -> Balls2 {
    Balls2::from_fn(1, balls.len(), |_, column| balls[column])
}

fn fused_expert(model: &Model<'_, '_>, known: &Midpoints, expert: ExpertId, s: &[Ball], keep: Keep<'_>) -> OfExpert {
    let biases = model.problem.b1().is_some();
    let [h, a] = fused::up_forward_of(model, known, expert);
    let y = (keep(Output::O) || keep(Output::Y)).then(|| fused::down_forward_of(model, known, expert, &a));
    let fused::DownBackward { dh, a_prime, ds } = fused::down_backward_activation_of(model, known, expert, &h, s);
    let mut results = BTreeMap::from([(Output::Ds, column(ds))]);
    if keep(Output::Dw2) {
        results.insert(Output::Dw2, fused::down_backward_weight_of(model, known, expert, a_prime.clone()));
    }
    if biases && keep(Output::Db2) {
        results.insert(Output::Db2, row(fused::b2_gradient_of(model, expert, s)));
    }
    let dx_expanded = up_backward(model, known, expert, &dh, keep, &mut results);
    results.extend([(Output::H, h), (Output::A, a), (Output::APrime, a_prime), (Output::Dh, dh)]);
    OfExpert { results, y, dx_expanded }
}

fn eager_expert(model: &Model<'_, '_>, known: &Midpoints, expert: ExpertId, s: &[Ball], keep: Keep<'_>) -> OfExpert {
    let biases = model.problem.b1().is_some();
    let h = eager::up_forward_of(model, known, expert);
    let a = eager::activate_rows(model, &h);
    let y = eager::down_forward_of(model, known, expert, &a);
    let eager::DownBackward { dh, ds } = eager::down_backward_activation_of(model, known, expert, &h, &y, s);
    let mut results = BTreeMap::from([(Output::Ds, column(ds))]);
    if keep(Output::Dw2) {
        results.insert(Output::Dw2, eager::down_backward_weight_of(model, known, expert, &a, s));
    }
    if biases && keep(Output::Db2) {
        results.insert(Output::Db2, row(eager::b2_gradient_of(model, expert, s)));
    }
    let dx_expanded = up_backward(model, known, expert, &dh, keep, &mut results);
    results.extend([(Output::H, h), (Output::A, a), (Output::Dh, dh)]);
    OfExpert { results, y: Some(y), dx_expanded }
}

/// What both models compute alike from dH: dw1, db1, and dx̃.
fn up_backward(
    model: &Model<'_, '_>,
    known: &Midpoints,
    expert: ExpertId,
    dh: &Balls2,
    keep: Keep<'_>,
    results: &mut BTreeMap<Output, Balls2>,
) -> Option<Balls2> {
    if keep(Output::Dw1) {
        results.insert(Output::Dw1, fused::up_backward_weight_of(model, known, expert, dh.clone()));
    }
    if model.problem.b1().is_some() && keep(Output::Db1) {
        results.insert(Output::Db1, row(fused::b1_gradient_of(model, dh)));
    }
    (keep(Output::Dx) || keep(Output::DxExpanded)).then(|| fused::up_backward_activation_of(model, known, expert, dh))
}

/// Sums over each token's rows, so far.
struct Sums {
    mid: Array2<f64>,
    rad: Array2<f64>,
    magnitude: Array2<f64>,
    /// Empty where no deviation asks for it.
    square: Array2<f64>,
}

impl Sums {
    fn new(model: &Model<'_, '_>) -> Self {
        let dim = (model.problem.t(), model.problem.d());
        let of = |needed: bool| Array2::zeros(if needed { dim } else { (dim.0, 0) });
        let measure = model.arithmetic.measure;
        let radii = measure != Measure::Midpoint;
        Self { mid: of(true), rad: of(radii), magnitude: of(radii), square: of(measure == Measure::Deviation) }
    }

    /// Adds the rows of some experts: those of y, which `scores` by row weight, or of dx̃.
    fn add_all(
        &mut self,
        model: &Model<'_, '_>,
        scores: Option<&Vec<Ball>>,
        lane: usize,
        computed: &[(ExpertId, Expanded)],
    ) {
        for (expert, expanded) in computed {
            let [y, dx_expanded] = &expanded[lane];
            let rows = model.routing.rows_of_expert(*expert);
            match (scores, y, dx_expanded) {
                (Some(scores), Some(y), _) => self.add(model, rows, y, |row, y| match model.rounding {
                    RoundingModel::Fused => model.arithmetic.product(scores[row], y),
                    RoundingModel::Eager => eager::weighted(model, scores[row], y),
                }),
                (None, _, Some(dx_expanded)) => self.add(model, rows, dx_expanded, |_, dx| dx),
                _ => {}
            }
        }
    }

    fn add(&mut self, model: &Model<'_, '_>, rows: Range<usize>, balls: &Balls2, term: impl Fn(usize, Ball) -> Ball) {
        let arithmetic: &Arithmetic = &model.arithmetic;
        for (here, row) in rows.enumerate() {
            let token = model.routing.row_token()[row].index();
            let terms = Zip::from(balls.mid.row(here)).and(balls.rad.row(here));
            let mut mids = self.mid.row_mut(token);
            if arithmetic.measure == Measure::Midpoint {
                terms.and(&mut mids).for_each(|&mid, &rad, sum| *sum += term(row, Ball { mid, rad }).mid);
                continue;
            }
            let (mut rads, mut magnitudes) = (self.rad.row_mut(token), self.magnitude.row_mut(token));
            let mut squares = self.square.row_mut(token).into_iter();
            terms.and(&mut mids).and(&mut rads).and(&mut magnitudes).for_each(
                |&mid, &rad, sum_mid, sum_rad, magnitude| {
                    let ball = Ball { mid: *sum_mid, rad: *sum_rad };
                    let mut sum = Sum { ball, magnitude: *magnitude, square: 0.0 };
                    sum.add(arithmetic, term(row, Ball { mid, rad }));
                    (*sum_mid, *sum_rad, *magnitude) = (sum.ball.mid, sum.ball.rad, sum.magnitude);
                    if let Some(square) = squares.next() {
                        *square += sum.square;
                    }
                },
            );
        }
    }

    /// The sums with their roundings, stored. Without weights a sum of m rows takes m − 1 roundings.
    fn finish(self, model: &Model<'_, '_>, weighted: bool) -> Balls2 {
        let arithmetic = &model.arithmetic;
        let Self { mut mid, mut rad, magnitude, square } = self;
        if arithmetic.measure == Measure::Midpoint {
            return Balls2::exact(mid);
        }
        let square = |token: usize, column: usize| square.get((token, column)).copied().unwrap_or(0.0);
        Zip::indexed(&mut mid).and(&mut rad).and(&magnitude).par_for_each(|(token, column), mid, rad, &magnitude| {
            let sum = Sum { ball: Ball { mid: *mid, rad: *rad }, magnitude, square: square(token, column) };
            let terms = model.rows_of_token(token);
            let ball = match model.rounding {
                RoundingModel::Fused => {
                    let roundings = if weighted { terms } else { terms.saturating_sub(1) };
                    let sum = arithmetic.summed(&arithmetic.accumulate, sum, roundings);
                    arithmetic.round(&arithmetic.storage, sum)
                }
                RoundingModel::Eager => eager::partial_sums(model, sum, terms),
            };
            (*mid, *rad) = (ball.mid, ball.rad);
        });
        Balls2 { mid, rad }
    }
}
