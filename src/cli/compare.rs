//! `sonicmoe compare`: the results of two runs against each other.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use ndarray::ArrayD;
use serde_json::{Value, json};

use crate::cli::{Console, written};
use crate::dump::{Dump, Model, Outputs, Overrides};
use crate::element::DType;
use crate::engine::{Output, RoundingModel, Stored};
use crate::error::Result;
use crate::oracle::difference::{Largest, largest_ratio};
use crate::oracle::{Difference, Verdict, bound};
use crate::report::{Align, Table, count, float, number};

/// Compares the results of two runs of one layer, tensor by tensor.
///
/// Where one of the files has the inputs, every difference is judged: two correct engines differ by
/// at most the sum of what each may err. Without inputs only equal bits pass.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  sonicmoe compare run.safetensors other.safetensors
  sonicmoe compare --json before.safetensors after.safetensors | jq .verdict

Columns: `ulps` counts places in the coarser of both types; `relative l2` is |a - b| over the larger
of |a| and |b|; `ratio` is the largest difference over the sum of both bounds.

Exit codes: 0 equal bits, or every difference within both bounds; 1 a difference that no two correct
engines have; 2 bad input or other shapes; 4 a result or the inputs are missing; 5 a fault of this
program. The worst by the order 5, 2, 1, 4, 0 wins.")]
pub struct CompareArgs {
    /// A run, or results alone
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Another
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// Judge differences under this model only: fused, fused_tensor_router or eager. Without it they
    /// are tried in this order
    #[arg(long, value_name = "MODEL")]
    pub rounding_model: Option<Model>,
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub json: bool,
}

/// One result in both files.
struct Compared {
    output: Output,
    types: [Option<DType>; 2],
    shapes: [Option<Vec<usize>>; 2],
    difference: Option<Difference>,
    ratio: Option<f64>,
}

impl Compared {
    fn verdict(&self) -> Verdict {
        match (&self.difference, self.ratio) {
            (None, _) if self.shapes.iter().any(Option::is_none) => Verdict::Incomplete,
            (None, _) => Verdict::ContractViolated,
            (Some(difference), _) if difference.is_bitwise_equal() => Verdict::Pass,
            (Some(_), Some(ratio)) if ratio <= 1.0 => Verdict::Pass,
            (Some(_), Some(_)) => Verdict::NumericFailure,
            (Some(difference), None) if difference.not_finite > 0 => Verdict::NumericFailure,
            (Some(_), None) => Verdict::Incomplete,
        }
    }
}

/// What the comparison of two files came to.
struct Comparison {
    rows: Vec<Compared>,
    model: Option<Model>,
    remarks: Vec<String>,
}

impl Comparison {
    fn verdict(&self) -> Verdict {
        self.rows.iter().map(Compared::verdict).max().unwrap_or(Verdict::Incomplete)
    }
}

/// Compares two files and writes what was found.
///
/// # Errors
/// A file that cannot be read, inputs that contradict each other, or output that cannot be written.
pub fn compare(args: &CompareArgs, console: &Console, out: &mut dyn Write) -> Result<Verdict> {
    let comparison = compared(args)?;
    if args.json {
        written(writeln!(out, "{}", as_json(args, &comparison)))?;
    } else {
        written(out.write_all(console.paint(&as_text(args, &comparison)).as_bytes()))?;
    }
    Ok(comparison.verdict())
}

fn compared(args: &CompareArgs) -> Result<Comparison> {
    let mut remarks = Vec::new();
    let (mut a, mut b) = (Outputs::read(&args.a)?, Outputs::read(&args.b)?);
    match (a.metadata.layout, b.metadata.layout) {
        (Some(first), Some(second)) if first != second => {
            remarks.push(format!("rows of gate and up: A {first}, B {second}; compared in one order"));
            interleave(&mut a)?;
            interleave(&mut b)?;
        }
        (None, None) | (Some(_), Some(_)) => {}
        (None, Some(_)) | (Some(_), None) => {
            remarks.push("only one file says where gate and up stand; both are taken as they are".into());
        }
    }
    if let (Some(first), Some(second)) = (&a.pairs, &b.pairs)
        && first != second
    {
        remarks.push("the pairs are others, or in another order: values by pair and by row are not compared".into());
        for outputs in [&mut a, &mut b] {
            outputs.results.retain(|output, _| !by_pair(*output));
        }
    }
    let mut rows = Vec::new();
    for output in Output::RESULTS.into_iter().chain(Output::INTERMEDIATES) {
        let (first, second) = (a.results.get(&output), b.results.get(&output));
        if first.is_none() && second.is_none() {
            continue;
        }
        let difference = first.zip(second).and_then(|(first, second)| Difference::between(first, second));
        let types = [first, second].map(|stored| stored.map(|stored| stored.dtype));
        let shapes = [first, second].map(|stored| stored.map(|stored| stored.values.shape().to_vec()));
        rows.push(Compared { output, types, shapes, difference, ratio: None });
    }
    let differs = rows.iter().any(|row| row.difference.as_ref().is_some_and(|found| !found.is_bitwise_equal()));
    let model = if differs { judge(args, &a, &b, &mut rows, &mut remarks)? } else { None };
    Ok(Comparison { rows, model, remarks })
}

fn by_pair(output: Output) -> bool {
    let by_row = [Output::H, Output::A, Output::Y, Output::Dh, Output::APrime, Output::DxExpanded];
    by_row.contains(&output) || matches!(output, Output::Ds | Output::Scores)
}

/// Brings dw1, db1, h and dh into our order.
fn interleave(outputs: &mut Outputs) -> Result<()> {
    let gated = outputs.metadata.activation.is_none_or(|activation| activation.gated());
    let (true, Some(layout)) = (gated, outputs.metadata.layout) else { return Ok(()) };
    for output in [Output::Dw1, Output::Db1, Output::H, Output::Dh] {
        if let Some(stored) = outputs.results.get_mut(&output)
            && stored.values.ndim() > 1
        {
            stored.values = layout.to_interleaved(output.name(), stored.values.view())?;
        }
    }
    Ok(())
}

/// Judges every difference by the sum of both bounds, under the tightest model that explains all.
fn judge(
    args: &CompareArgs,
    a: &Outputs,
    b: &Outputs,
    rows: &mut [Compared],
    remarks: &mut Vec<String>,
) -> Result<Option<Model>> {
    let inputs: Vec<Dump> = [a, b]
        .into_iter()
        .filter(|outputs| outputs.with_inputs)
        .map(|outputs| Dump::read(&outputs.path, &Overrides::default()))
        .collect::<Result<_>>()?;
    let Some(dump) = inputs.first() else {
        remarks.push("neither file has the inputs: no bound says whether a difference is rounding".into());
        return Ok(None);
    };
    if let [first, second] = &inputs[..]
        && let Some(name) = other_input(first, second)
    {
        remarks.push(format!("{name} differs: these are runs of two problems, and no bound covers both"));
        return Ok(None);
    }
    let declared = |outputs: &Outputs| outputs.metadata.rounding_model.unwrap_or(RoundingModel::Eager);
    let fused = declared(a) == RoundingModel::Fused && declared(b) == RoundingModel::Fused;
    let models: Vec<Model> = match args.rounding_model {
        Some(model) => vec![model],
        None => dump.models().into_iter().filter(|model| !(fused && *model == Model::Eager)).collect(),
    };
    let mut last = None;
    for model in models {
        let sums = sums_of_bounds(dump, [a, b], model)?;
        for row in rows.iter_mut() {
            let (Some(first), Some(second)) = (a.results.get(&row.output), b.results.get(&row.output)) else {
                continue;
            };
            let Some(bounds) = sums.get(&row.output) else { continue };
            row.ratio = row.difference.is_some().then(|| largest_ratio(&first.values, &second.values, bounds));
        }
        last = Some(model);
        if rows.iter().all(|row| row.ratio.is_none_or(|ratio| ratio <= 1.0)) {
            break;
        }
    }
    Ok(last)
}

/// The first input in which two dumps differ.
fn other_input(first: &Dump, second: &Dump) -> Option<&'static str> {
    let (a, b) = (&first.problem, &second.problem);
    let routing = match (a.gating(), b.gating()) {
        (crate::Gating::Given { routing, scores }, crate::Gating::Given { routing: other, scores: others }) => {
            routing == other && scores == others
        }
        (crate::Gating::Router(router), crate::Gating::Router(other)) => {
            router.w == other.w && router.b == other.b && (router.k, router.convention) == (other.k, other.convention)
        }
        _ => false,
    };
    let same = [
        ("x", a.x() == b.x()),
        ("w1", a.w1() == b.w1()),
        ("w2", a.w2() == b.w2()),
        ("b1", a.b1() == b.b1()),
        ("b2", a.b2() == b.b2()),
        ("dout", a.dout() == b.dout()),
        ("the activation", a.activation() == b.activation()),
        ("the routing", routing),
    ];
    same.into_iter().find(|(_, same)| !same).map(|(name, _)| name)
}

/// By result, what both engines may err together, in the order of the values compared.
fn sums_of_bounds(dump: &Dump, both: [&Outputs; 2], model: Model) -> Result<BTreeMap<Output, ArrayD<f64>>> {
    let chosen = dump.choose(&dump.numerics(model))?;
    let mut sums: BTreeMap<Output, ArrayD<f64>> = BTreeMap::new();
    let in_order = both.iter().all(|outputs| outputs.metadata.layout.is_some())
        && both[0].metadata.layout != both[1].metadata.layout;
    for outputs in both {
        let storage = outputs.storage().unwrap_or(dump.storage);
        let score = if storage == DType::F64 { DType::F64 } else { dump.score };
        let score = outputs.results.get(&Output::Ds).map_or(score, |Stored { dtype, .. }| *dtype);
        let numerics = model.numerics(storage, score, dump.function_ulps);
        for (output, bounded) in bound::layer(&dump.problem, &chosen.routing, &numerics)? {
            // The truths of two types differ by nothing: they are of the same inputs.
            let bound = if in_order { bounded.bound } else { dump.in_file_order(output, &bounded.bound)? };
            match sums.get_mut(&output) {
                Some(sum) => *sum += &bound,
                None => _ = sums.insert(output, bound),
            }
        }
    }
    Ok(sums)
}

fn as_text(args: &CompareArgs, comparison: &Comparison) -> String {
    let mut text = format!("A {}\nB {}\n\n", args.a.display(), args.b.display());
    let mut table = Table::new([
        ("result", Align::Left),
        ("type", Align::Left),
        ("elements", Align::Right),
        ("differing", Align::Right),
        ("largest", Align::Right),
        ("at", Align::Left),
        ("ulps", Align::Right),
        ("relative l2", Align::Right),
        ("ratio", Align::Right),
        ("verdict", Align::Left),
    ]);
    for row in &comparison.rows {
        let types = match row.types {
            [Some(a), Some(b)] if a == b => a.to_string(),
            types => types.map(|dtype| dtype.map_or("–", DType::name)).join("/"),
        };
        let Some(found) = &row.difference else {
            let shapes = row.shapes.clone().map(|shape| shape.map_or("none".into(), |shape| format!("{shape:?}")));
            let said = format!("A {}, B {}", shapes[0], shapes[1]);
            table.row([row.output.name(), &types, "", "", "", &said, "", "", "", row.verdict().name()]);
            continue;
        };
        let (largest, at) = match &found.largest {
            Some(Largest { at, a, b }) => (number((a - b).abs()), format!("{at:?}")),
            None => ("0".into(), String::new()),
        };
        table.row([
            row.output.to_string(),
            types,
            count(found.elements as u64),
            count(found.differing as u64),
            largest,
            at,
            count(found.ulps),
            number(found.relative_l2),
            row.ratio.map_or("–".into(), number),
            row.verdict().to_string(),
        ]);
    }
    text += &table.to_string();
    text.push('\n');
    for remark in &comparison.remarks {
        let _ = writeln!(text, "{remark}");
    }
    let equal = comparison.rows.iter().all(|row| row.difference.as_ref().is_some_and(Difference::is_bitwise_equal));
    let words = match (equal, comparison.model) {
        _ if comparison.rows.is_empty() => "no result in either file".into(),
        (true, _) => "every result has the same bits".into(),
        (false, Some(model)) => format!("judged by the sum of both bounds, {}", model.words()),
        (false, None) => "results differ".into(),
    };
    let _ = writeln!(text, "{} results, {words}: {}", comparison.rows.len(), comparison.verdict());
    text
}

fn as_json(args: &CompareArgs, comparison: &Comparison) -> Value {
    let row = |row: &Compared| {
        let found = row.difference.as_ref().map(|found| {
            let largest = found.largest.as_ref().map(|Largest { at, a, b }| {
                json!({ "at": at, "a": float(*a), "b": float(*b), "difference": float((a - b).abs()) })
            });
            json!({
                "elements": found.elements, "differing": found.differing, "not_finite": found.not_finite,
                "bitwise_equal": found.is_bitwise_equal(), "largest": largest, "ulps": found.ulps,
                "relative_l2": float(found.relative_l2),
            })
        });
        json!({
            "result": row.output.name(), "types": row.types.map(|dtype| dtype.map(DType::name)),
            "shapes": row.shapes, "difference": found, "ratio": row.ratio.map(float),
            "verdict": row.verdict().name(),
        })
    };
    json!({
        "schema": "sonicmoe.compare/1", "a": args.a.display().to_string(), "b": args.b.display().to_string(),
        "model": comparison.model.map(Model::name), "results": comparison.rows.iter().map(row).collect::<Vec<_>>(),
        "remarks": comparison.remarks, "verdict": comparison.verdict().name(),
        "exit_code": comparison.verdict().code(),
    })
}
