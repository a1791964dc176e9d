//! The kernels one after the other, expert by expert, as several arithmetics have them.
//!
//! The arithmetics share their midpoints, so one more costs its radii alone. No array by row is held
//! beyond its expert unless it is asked for: y and dx̃ are added to their tokens as they come.

use std::collections::BTreeMap;
use std::ops::Range;

use ndarray::{Array2, ArrayD, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use super::ball::Ball;
use super::matrix::Balls2;
use super::midpoints::Midpoints;
use super::sums::Sums;
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
pub(super) struct OfLayer {
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

/// A piece of a result, numbers in row-major order: some indices of its first axis as rows, or as rows of
/// an expert's matrix.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) truth: Array2<f64>,
    /// Of each arithmetic; none for midpoints alone.
    pub(crate) radii: Vec<Array2<f64>>,
}

/// What one expert gives of the results that are handed out.
pub(crate) type Parts = BTreeMap<Output, Part>;

/// The kernels of a layer as `models` have them (of one problem, routing and rounding model, and different
/// arithmetics), some experts at a time.
///
/// What `keep` names is computed, and of that what `apart` names is handed out as it comes: weight gradients
/// and arrays by row, which nothing needs whole. The rest is there at the end.
pub(super) struct Kernels<'m, 'a, 'p> {
    models: &'m [Model<'a, 'p>],
    /// By row, of each arithmetic.
    scores: Vec<Vec<Ball>>,
    keep: Keep<'m>,
    apart: Keep<'m>,
    stores: Vec<Store>,
    o: Option<Vec<Sums>>,
    dx: Option<Vec<Sums>>,
}

impl<'m, 'a, 'p> Kernels<'m, 'a, 'p> {
    pub(super) fn new(models: &'m [Model<'a, 'p>], scores: Vec<Vec<Ball>>, keep: Keep<'m>, apart: Keep<'m>) -> Self {
        let sums = |output: Output| keep(output).then(|| models.iter().map(Sums::new).collect::<Vec<_>>());
        let stores = models.first().map(|first| stores(first, models.len(), keep, apart)).unwrap_or_default();
        Self { models, scores, keep, apart, stores, o: sums(Output::O), dx: sums(Output::Dx) }
    }

    /// The next experts.
    pub(super) fn experts(&mut self, experts: Range<usize>) -> Vec<Parts> {
        let Self { models, scores, keep, apart, stores, o, dx } = self;
        let (models, scores, keep, apart): (&[Model<'_, '_>], &[Vec<Ball>], _, _) = (models, scores, *keep, *apart);
        let computed: Vec<(Parts, Option<Expanded>)> = places(stores, experts)
            .into_par_iter()
            .map(|(expert, places)| of_expert(models, scores, expert, [keep, apart], places))
            .collect();
        let (parts, expanded): (Vec<_>, Vec<_>) = computed.into_iter().unzip();
        let expanded: Vec<Expanded> = expanded.into_iter().flatten().collect();
        // In the order of the experts, whatever the number of threads.
        rayon::join(
            || each(o, |lane, sums| sums.add_all(&models[lane], Some(&scores[lane]), lane, &expanded)),
            || each(dx, |lane, sums| sums.add_all(&models[lane], None, lane, &expanded)),
        );
        parts
    }

    /// What is left when all experts have been there; results go to `found`.
    pub(super) fn finish(self, found: &mut Found) -> Result<Vec<OfLayer>> {
        let Self { models, stores, mut o, mut dx, .. } = self;
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
        Ok(o.into_iter().zip(dx).zip(ds).map(|((o, dx), ds)| OfLayer { o, dx, ds }).collect())
    }
}

fn each(sums: &mut Option<Vec<Sums>>, add: impl Fn(usize, &mut Sums) + Sync) {
    if let Some(lanes) = sums {
        lanes.par_iter_mut().enumerate().for_each(|(lane, sums)| add(lane, sums));
    }
}

/// A result, its truth first and then the radii: the rows of one expert after those of another.
struct Store {
    output: Output,
    shape: Vec<usize>,
    /// Where each expert's rows begin, and where they end.
    offsets: Vec<usize>,
    arrays: Vec<Array2<f64>>,
}

fn stores(model: &Model<'_, '_>, lanes: usize, keep: Keep<'_>, apart: Keep<'_>) -> Vec<Store> {
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
        Output::APrime => model.rounding == RoundingModel::Fused && keep(output) && !apart(output),
        _ => keep(output) && !(apart(output) && in_parts(output)),
    };
    let stores = shapes.into_iter().filter(|(output, ..)| there(*output)).map(|(output, offsets, shape)| {
        let dim = (offsets.last().copied().unwrap_or(0), shape.last().copied().unwrap_or(0));
        Store { output, shape, offsets, arrays: (0..=lanes).map(|_| Array2::zeros(dim)).collect() }
    });
    stores.collect()
}

/// The results that can be handed out: by expert, or by row in the order of experts.
pub(crate) fn in_parts(output: Output) -> bool {
    use Output::{A, APrime, Dh, Dw1, Dw2, DxExpanded, H, Y};
    matches!(output, H | A | Y | Dh | APrime | DxExpanded | Dw1 | Dw2)
}

/// Where one expert's part of each result goes: truth and radii.
type Places<'s> = BTreeMap<Output, Vec<ArrayViewMut2<'s, f64>>>;

fn places(stores: &mut [Store], experts: Range<usize>) -> Vec<(ExpertId, Places<'_>)> {
    let mut places: Vec<_> = experts.clone().map(|expert| (ExpertId(expert as u32), Places::new())).collect();
    for Store { output, offsets, arrays, .. } in stores {
        let offsets = &offsets[experts.start..=experts.end];
        for array in arrays {
            let mut rest = array.slice_mut(s![offsets[0]..offsets[offsets.len() - 1], ..]);
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
pub(super) struct Expanded {
    pub(super) expert: ExpertId,
    pub(super) lanes: Vec<[Option<Balls2>; 2]>,
}

fn of_expert(
    models: &[Model<'_, '_>],
    scores: &[Vec<Ball>],
    expert: ExpertId,
    [keep, apart]: [Keep<'_>; 2],
    mut places: Places<'_>,
) -> (Parts, Option<Expanded>) {
    let mut parts = Parts::new();
    let Some(first) = models.first() else { return (parts, None) };
    let handed_out = |output: Output| keep(output) && apart(output) && in_parts(output);
    let rows = first.routing.rows_of_expert(expert);
    if rows.is_empty() {
        let (d, n, width) = (first.problem.d(), first.problem.n(), first.problem.h_width());
        for (output, dim) in [(Output::Dw1, (width, d)), (Output::Dw2, (d, n))] {
            if handed_out(output) {
                let radii = models.iter().filter(|model| model.has_radii()).map(|_| Array2::zeros(dim)).collect();
                parts.insert(output, Part { truth: Array2::zeros(dim), radii });
            }
        }
        return (parts, None);
    }
    let known = Midpoints::shared_by(models.len());
    let mut lanes = Vec::with_capacity(models.len());
    for (lane, (model, scores)) in models.iter().zip(scores).enumerate() {
        let s = &scores[rows.clone()];
        let OfExpert { results, y, dx_expanded } = match model.rounding {
            RoundingModel::Fused => fused_expert(model, &known, expert, s, keep),
            RoundingModel::Eager => eager_expert(model, &known, expert, s, keep),
        };
        let mut hand_out = |output: Output, mid: Array2<f64>, rad: Array2<f64>| {
            let part = parts.entry(output).or_insert_with(|| Part { truth: in_rows(mid), radii: Vec::new() });
            if model.has_radii() {
                part.radii.push(in_rows(rad));
            }
        };
        let mut keep_whole = |output: Output, balls: &Balls2| {
            let Some(places) = places.get_mut(&output) else { return };
            if lane == 0 {
                places[0].assign(&balls.mid);
            }
            if model.has_radii() {
                places[1 + lane].assign(&balls.rad);
            }
        };
        for (output, balls) in results {
            if handed_out(output) {
                hand_out(output, balls.mid, balls.rad);
            } else {
                keep_whole(output, &balls);
            }
        }
        for (output, balls) in [(Output::Y, &y), (Output::DxExpanded, &dx_expanded)] {
            match balls {
                Some(balls) if handed_out(output) => hand_out(output, balls.mid.clone(), balls.rad.clone()),
                Some(balls) => keep_whole(output, balls),
                None => {}
            }
        }
        lanes.push([y.filter(|_| keep(Output::O)), dx_expanded.filter(|_| keep(Output::Dx))]);
    }
    (parts, Some(Expanded { expert, lanes }))
}

/// The same numbers, rows one after the other.
fn in_rows(array: Array2<f64>) -> Array2<f64> {
    if array.is_standard_layout() { array } else { array.as_standard_layout().into_owned() }
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
        results.insert(Output::Dw2, fused::down_backward_weight_of(model, known, expert, &a_prime));
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
        results.insert(Output::Dw1, fused::up_backward_weight_of(model, known, expert, dh));
    }
    if model.problem.b1().is_some() && keep(Output::Db1) {
        results.insert(Output::Db1, row(fused::b1_gradient_of(model, dh)));
    }
    (keep(Output::Dx) || keep(Output::DxExpanded)).then(|| fused::up_backward_activation_of(model, known, expert, dh))
}
