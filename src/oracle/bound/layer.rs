//! The kernels one after the other, expert by expert, as several arithmetics have them.
//!
//! The arithmetics share their midpoints, so one more costs its radii alone. No array by row is held
//! beyond its expert unless it is asked for: y and dx̃ are added to their tokens as they come.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use ndarray::{Array2, ArrayD};
use rayon::prelude::*;

use super::ball::Ball;
use super::buffers::Buffers;
use super::matrix::Balls2;
use super::midpoints::Midpoints;
use super::sums::Sums;
use super::{Model, eager, fused};
use crate::engine::{Output, RoundingModel};
use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::routing::Routing;
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
    buffers: &'m Buffers,
}

impl<'m, 'a, 'p> Kernels<'m, 'a, 'p> {
    pub(super) fn new(
        models: &'m [Model<'a, 'p>],
        scores: Vec<Vec<Ball>>,
        [keep, apart]: [Keep<'m>; 2],
        buffers: &'m Buffers,
    ) -> Self {
        let sums = |output: Output| keep(output).then(|| models.iter().map(Sums::new).collect::<Vec<_>>());
        let stores = stores(models, keep, apart);
        Self { models, scores, keep, apart, stores, o: sums(Output::O), dx: sums(Output::Dx), buffers }
    }

    /// The next experts.
    pub(super) fn experts(&mut self, experts: Range<usize>) -> Vec<Parts> {
        let Self { models, scores, keep, apart, stores, o, dx, buffers } = self;
        let (models, scores, keep, apart): (&[Model<'_, '_>], &[Vec<Ball>], _, _) = (models, scores, *keep, *apart);
        let experts = experts.map(|expert| ExpertId(expert as u32));
        let computed: Vec<(Parts, Option<Expanded>)> = experts
            .collect::<Vec<_>>()
            .into_par_iter()
            .map(|expert| of_expert(models, scores, expert, keep, buffers))
            .collect();
        let (mut parts, expanded): (Vec<_>, Vec<_>) = computed.into_iter().unzip();
        // In the order of the experts, whatever the number of threads.
        let of_experts = || expanded.iter().flatten();
        rayon::join(
            || each(o, |lane, sums| sums.add_all(&models[lane], Some(&scores[lane]), lane, of_experts())),
            || each(dx, |lane, sums| sums.add_all(&models[lane], None, lane, of_experts())),
        );
        for (parts, expanded) in parts.iter_mut().zip(expanded) {
            for (model, lane) in models.iter().zip(expanded.into_iter().flat_map(|expanded| expanded.lanes)) {
                for (output, balls) in [Output::Y, Output::DxExpanded].into_iter().zip(lane) {
                    let Some(balls) = balls else { continue };
                    if keep(output) {
                        add_part(parts, output, model, balls, buffers)
                    } else {
                        model.give(buffers, balls)
                    }
                }
            }
            for store in stores.iter_mut() {
                if let Some(part) = parts.remove(&store.output) {
                    store.append(part, buffers);
                }
            }
            parts.retain(|&output, _| apart(output) && in_parts(output));
        }
        parts
    }

    /// What is left when all experts have been there; results go to `found`.
    pub(super) fn finish(self, found: &mut Found) -> Result<Vec<OfLayer>> {
        let Self { models, stores, mut o, mut dx, .. } = self;
        found.radii.resize_with(models.len(), BTreeMap::new);
        let mut ds = Vec::new();
        for Store { output, shape, arrays } in stores {
            let mut arrays = arrays.into_iter();
            let truth = arrays.next().unwrap_or_default();
            // Midpoints have radii of 0.
            let radii = models.iter().map(|model| match model.has_radii() {
                true => arrays.next().unwrap_or_default(),
                false => vec![0.0; truth.len()],
            });
            let radii: Vec<Vec<f64>> = radii.collect();
            if output == Output::Ds {
                let balls = |rad: Vec<f64>| truth.iter().zip(rad).map(|(&mid, rad)| Ball { mid, rad }).collect();
                ds = radii.into_iter().map(balls).collect();
                continue;
            }
            let shaped = |numbers: Vec<f64>| {
                let array = ArrayD::from_shape_vec(shape.as_slice(), numbers);
                array.map_err(|error| Error::internal(format!("{output}: {error}")))
            };
            for (of_lane, radii) in found.radii.iter_mut().zip(radii) {
                of_lane.insert(output, shaped(radii)?);
            }
            found.truths.insert(output, shaped(truth)?);
        }
        let finished = |sums: &mut Option<Vec<Sums>>, weighted: bool| -> Vec<Option<Balls2>> {
            match sums.take() {
                Some(sums) => {
                    sums.into_iter().zip(models).map(|(sums, model)| Some(sums.finish(model, weighted, 0))).collect()
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

/// A result that is kept whole, its truth first and then the radii, as far as its experts have been there.
struct Store {
    output: Output,
    shape: Vec<usize>,
    arrays: Vec<Vec<f64>>,
}

impl Store {
    /// Adds the next expert's part.
    fn append(&mut self, part: Part, buffers: &Buffers) {
        let Part { truth, radii } = part;
        for (array, part) in self.arrays.iter_mut().zip([truth].into_iter().chain(radii)) {
            match part.as_slice() {
                Some(numbers) => array.extend_from_slice(numbers),
                None => array.extend(&part),
            }
            buffers.give(part);
        }
    }
}

fn stores(models: &[Model<'_, '_>], keep: Keep<'_>, apart: Keep<'_>) -> Vec<Store> {
    let Some(model) = models.first() else { return Vec::new() };
    let (problem, routing) = (model.problem, model.routing);
    let (d, n, e, width, r) = (problem.d(), problem.n(), problem.e(), problem.h_width(), routing.routed());
    let biases = problem.b1().is_some();
    let shapes = [
        (Output::H, vec![r, width]),
        (Output::A, vec![r, n]),
        (Output::Y, vec![r, d]),
        (Output::Dh, vec![r, width]),
        (Output::APrime, vec![r, n]),
        (Output::DxExpanded, vec![r, d]),
        (Output::Dw1, vec![e, width, d]),
        (Output::Dw2, vec![e, d, n]),
        (Output::Db1, vec![e, width]),
        (Output::Db2, vec![e, d]),
        (Output::Ds, vec![r]),
    ];
    let there = |output: Output| match output {
        // The router's part of everything stands on it.
        Output::Ds => true,
        Output::Db1 | Output::Db2 => biases && keep(output),
        Output::APrime => model.rounding == RoundingModel::Fused && keep(output) && !apart(output),
        _ => keep(output) && !(apart(output) && in_parts(output)),
    };
    let arrays = 1 + models.iter().filter(|model| model.has_radii()).count();
    let stores = shapes.into_iter().filter(|(output, _)| there(*output)).map(|(output, shape)| {
        let elements: usize = shape.iter().product();
        Store { output, shape, arrays: (0..arrays).map(|_| Vec::with_capacity(elements)).collect() }
    });
    stores.collect()
}

/// The results that can be handed out: by expert, or by row in the order of experts.
pub(crate) fn in_parts(output: Output) -> bool {
    use Output::{A, APrime, Dh, Dw1, Dw2, DxExpanded, H, Y};
    matches!(output, H | A | Y | Dh | APrime | DxExpanded | Dw1 | Dw2)
}

/// Where an expert's part of such a result begins, in row-major order.
pub(crate) fn place_of(output: Output, problem: &Problem<'_, f64>, routing: &Routing, expert: ExpertId) -> usize {
    let (d, n, width) = (problem.d(), problem.n(), problem.h_width());
    let row = routing.rows_of_expert(expert).start;
    match output {
        Output::Dw1 => expert.index() * width * d,
        Output::Dw2 => expert.index() * d * n,
        Output::H | Output::Dh => row * width,
        Output::A | Output::APrime => row * n,
        _ => row * d,
    }
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
    keep: Keep<'_>,
    buffers: &Buffers,
) -> (Parts, Option<Expanded>) {
    let mut parts = Parts::new();
    let Some(first) = models.first() else { return (parts, None) };
    let rows = first.routing.rows_of_expert(expert);
    if rows.is_empty() {
        let (d, n, width) = (first.problem.d(), first.problem.n(), first.problem.h_width());
        for (output, dim) in
            [(Output::Dw1, (width, d)), (Output::Dw2, (d, n)), (Output::Db1, (1, width)), (Output::Db2, (1, d))]
        {
            if keep(output) {
                let radii = models.iter().filter(|model| model.has_radii()).map(|_| Array2::zeros(dim)).collect();
                parts.insert(output, Part { truth: Array2::zeros(dim), radii });
            }
        }
        return (parts, None);
    }
    let known = Midpoints::shared_by(models.len(), buffers);
    let mut lanes = Vec::with_capacity(models.len());
    for (model, scores) in models.iter().zip(scores) {
        let s = &scores[rows.clone()];
        let OfExpert { results, y, dx_expanded } = match model.rounding {
            RoundingModel::Fused => fused_expert(model, &known, expert, s, keep),
            RoundingModel::Eager => eager_expert(model, &known, expert, s, keep),
        };
        for (output, balls) in results {
            // The router's part of everything stands on ds.
            if keep(output) || output == Output::Ds {
                add_part(&mut parts, output, model, balls, buffers);
            } else {
                known.give(model, balls);
            }
        }
        lanes.push([y, dx_expanded]);
    }
    (parts, Some(Expanded { expert, lanes }))
}

/// The next arithmetic's part of a result; midpoints are the first's.
fn add_part(parts: &mut Parts, output: Output, model: &Model<'_, '_>, balls: Balls2, buffers: &Buffers) {
    let Balls2 { mid, rad } = balls;
    let part = match parts.entry(output) {
        Entry::Vacant(entry) => entry.insert(Part { truth: in_rows(mid), radii: Vec::new() }),
        Entry::Occupied(entry) => {
            buffers.give(mid);
            entry.into_mut()
        }
    };
    match model.has_radii() {
        true => part.radii.push(in_rows(rad)),
        false => buffers.give_zeros(rad),
    }
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

fn fused_expert(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    s: &[Ball],
    keep: Keep<'_>,
) -> OfExpert {
    let biases = model.problem.b1().is_some();
    let fused::UpForward { h, a, h_between } = fused::up_forward(model, known, expert, true);
    let y = (keep(Output::O) || keep(Output::Y)).then(|| fused::down_forward(model, known, expert, a.operand()));
    let fused::DownBackward { dh, a_prime, ds } =
        fused::down_backward_activation(model, known, expert, (&h, h_between.as_ref()), s);
    if let Some(h_between) = h_between {
        known.buffers.give(h_between);
    }
    let mut results = BTreeMap::from([(Output::Ds, column(ds))]);
    if keep(Output::Dw2) {
        results.insert(Output::Dw2, fused::down_backward_weight(model, known, expert, a_prime.operand()));
    }
    if biases && keep(Output::Db2) {
        results.insert(Output::Db2, row(fused::b2_gradient(model, known, expert, s)));
    }
    let dx_expanded = up_backward(model, known, expert, &dh, keep, &mut results);
    results.extend([(Output::H, h), (Output::A, a), (Output::APrime, a_prime), (Output::Dh, dh)]);
    OfExpert { results, y, dx_expanded }
}

fn eager_expert(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    s: &[Ball],
    keep: Keep<'_>,
) -> OfExpert {
    let biases = model.problem.b1().is_some();
    let h = eager::up_forward(model, known, expert);
    let a = eager::activate(model, known, &h);
    let y = eager::down_forward(model, known, expert, a.operand());
    let dy = eager::y_gradient(model, known, expert, s);
    let eager::DownBackward { dh, ds } = eager::down_backward_activation(model, known, expert, [&h, &y, &dy]);
    let mut results = BTreeMap::from([(Output::Ds, column(ds))]);
    if keep(Output::Dw2) {
        results.insert(Output::Dw2, eager::down_backward_weight(model, known, a.operand(), &dy));
    }
    if biases && keep(Output::Db2) {
        results.insert(Output::Db2, row(eager::b2_gradient(model, &dy)));
    }
    known.give(model, dy);
    let dx_expanded = up_backward(model, known, expert, &dh, keep, &mut results);
    results.extend([(Output::H, h), (Output::A, a), (Output::Dh, dh)]);
    OfExpert { results, y: Some(y), dx_expanded }
}

/// What both models compute alike from dH: dw1, db1, and dx̃.
fn up_backward(
    model: &Model<'_, '_>,
    known: &Midpoints<'_>,
    expert: ExpertId,
    dh: &Balls2,
    keep: Keep<'_>,
    results: &mut BTreeMap<Output, Balls2>,
) -> Option<Balls2> {
    let dh = dh.operand();
    if keep(Output::Dw1) {
        results.insert(Output::Dw1, fused::up_backward_weight(model, known, expert, dh));
    }
    if model.problem.b1().is_some() && keep(Output::Db1) {
        results.insert(Output::Db1, row(fused::b1_gradient(model, dh)));
    }
    let wanted = keep(Output::Dx) || keep(Output::DxExpanded);
    wanted.then(|| fused::up_backward_activation(model, known, expert, dh))
}
