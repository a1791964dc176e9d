//! The reports of `check` say the same as its tables, and no file can write into them.

use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::Value;
use sonicmoe::cli::Console;
use sonicmoe::cli::check::{CheckArgs, check};
use sonicmoe::oracle::Verdict;

use half::bf16;
use sonicmoe::case::{Case, Load, Pairing};
use sonicmoe::dump::{Metadata, write};
use sonicmoe::engine::RoundingModel;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Convention, Record};

use crate::dumps::edit::{File, data, save};
use crate::kept::{Tolerance, compare_documents};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: CheckArgs,
}

fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("reports_{name}"))
}

/// Runs `check` with these words and returns the verdict and what it printed.
fn run(words: &[&str]) -> (Verdict, String) {
    let mut out = Vec::new();
    let args = Line::parse_from(["check"].iter().chain(words)).args;
    let verdict = check(&args, &Console { colours: false }, &mut out).unwrap();
    (verdict, String::from_utf8(out).unwrap())
}

/// A right file, a wrong one, one without dw2 and one that is none.
fn files() -> Vec<PathBuf> {
    let right = data("hf_olmoe_bf16");
    let file = File::of_data("hf_olmoe_bf16");
    let wrong = file.clone().edit("o", |values| values.fill(0.0)).save("reports_wrong");
    let incomplete = file.without("dw2").save("reports_incomplete");
    vec![right, wrong, incomplete, save("reports_broken", b"no dump")]
}

fn words(files: &[PathBuf]) -> Vec<&str> {
    files.iter().map(|file| file.to_str().unwrap()).collect()
}

/// The parts of JSON Schema that our schema uses, and no others.
fn conforms(value: &Value, schema: &Value, root: &Value) -> Result<(), String> {
    for (key, rule) in schema.as_object().unwrap() {
        let holds = match key.as_str() {
            "$schema" | "$defs" | "title" | "description" | "required" | "additionalProperties" => true,
            "$ref" => {
                let name = rule.as_str().unwrap().strip_prefix("#/$defs/").unwrap();
                return conforms(value, &root["$defs"][name], root);
            }
            "anyOf" => rule.as_array().unwrap().iter().any(|choice| conforms(value, choice, root).is_ok()),
            "enum" => rule.as_array().unwrap().contains(value),
            "const" => rule == value,
            "minimum" => value.as_f64().is_none_or(|value| value >= rule.as_f64().unwrap()),
            "type" => {
                let types = rule.as_array().cloned().unwrap_or_else(|| vec![rule.clone()]);
                types.iter().any(|name| match name.as_str().unwrap() {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "number" => value.is_number(),
                    "null" => value.is_null(),
                    other => panic!("type {other}"),
                })
            }
            "items" => {
                for item in value.as_array().into_iter().flatten() {
                    conforms(item, rule, root)?;
                }
                true
            }
            "properties" => {
                let Some(object) = value.as_object() else { return Err(format!("{value} is no object")) };
                assert_eq!(schema["additionalProperties"], false, "a field without a meaning would pass");
                for (field, value) in object {
                    let known = rule.get(field).ok_or_else(|| format!("{field} is not in the schema"))?;
                    conforms(value, known, root).map_err(|error| format!("{field}: {error}"))?;
                }
                let required = schema["required"].as_array().unwrap();
                required.iter().all(|field| object.contains_key(field.as_str().unwrap()))
            }
            other => panic!("this validator does not know {other}"),
        };
        if !holds {
            return Err(format!("{value} breaks {key}: {rule}"));
        }
    }
    Ok(())
}

fn schema() -> Value {
    let (verdict, text) = run(&["--json-schema"]);
    assert_eq!(verdict, Verdict::Pass);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn every_field_of_the_json_report_is_in_its_schema_and_every_required_one_is_there() {
    let (files, schema) = (files(), schema());
    let (_, text) = run(&[&["--json"], &words(&files)[..]].concat());
    let document: Value = serde_json::from_str(&text).unwrap();
    conforms(&document, &schema, &schema).unwrap();
    assert_eq!(document["files"].as_array().unwrap().len(), 4);
    assert!(document["files"][0]["tokens_per_expert"].as_array().unwrap().len() > 1);
}

#[test]
fn the_schema_refuses_what_the_report_never_says() {
    let schema = schema();
    let (_, text) = run(&["--json", data("hf_olmoe_bf16").to_str().unwrap()]);
    let document: Value = serde_json::from_str(&text).unwrap();
    let changed = |pointer: &str, value: Value| {
        let mut changed = document.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        conforms(&changed, &schema, &schema)
    };
    assert!(changed("/verdict", "GOOD".into()).is_err());
    assert!(changed("/files/0/results/0/elements", (-1).into()).is_err());
    assert!(changed("/files/0/results/0", serde_json::json!({})).is_err());
    assert!(changed("/files/0/sizes", serde_json::json!({ "T": 1, "new": 2 })).is_err());
    assert!(changed("/files/0/results/0/floor", "inf".into()).is_ok());
}

#[test]
fn junit_counts_a_case_per_result_by_its_fate() {
    let (files, report) = (files(), scratch("report.xml"));
    let (verdict, _) = run(&[&["--junit", report.to_str().unwrap()], &words(&files)[..]].concat());
    assert_eq!(verdict, Verdict::ContractViolated);
    let xml = std::fs::read_to_string(report).unwrap();
    // Five required results a file; the wrong file fails in o alone, the third lacks dw2, the last is none.
    let totals = xml.lines().find(|line| line.starts_with("<testsuites")).unwrap();
    assert!(totals.contains("failures=\"1\" errors=\"2\" skipped="), "{totals}");
    assert_eq!(xml.matches("<testsuite ").count(), 4);
    assert_eq!(xml.matches("<failure type=\"FAIL\"").count(), 1);
    assert!(xml.contains("o is required") || xml.contains("dw2 is required"), "{xml}");
}

#[test]
fn the_page_is_whole_by_itself_and_shows_every_picture_of_every_file() {
    let (files, report) = (files(), scratch("report.html"));
    run(&[&["--html", report.to_str().unwrap()], &words(&files)[..]].concat());
    let page = std::fs::read_to_string(report).unwrap();
    for foreign in ["<script", "http://", "https://", "src=", "href=", "url(", "@import"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    assert!(page.contains("prefers-color-scheme: dark"));
    assert_eq!(page.matches("<article>").count(), 4);
    for picture in ["error against bound of", "tokens per expert, with padding", "bytes kept from forward"] {
        assert_eq!(page.matches(picture).count(), 3, "{picture}");
    }
    assert!(page.contains("worst error over bound by token and column"));
    assert!(page.contains("worst error over bound by expert and column"));
    // The numbers are those of the tables.
    let (_, text) = run(&[files[1].to_str().unwrap()]);
    let row = text.lines().find(|line| line.trim_start().starts_with("o ")).unwrap();
    for cell in row.split_whitespace() {
        assert!(page.contains(&format!("<td>{cell}</td>")) || cell == "o", "{cell}");
    }
    assert_balanced(&page);
}

/// Every tag that opens closes, in order.
fn assert_balanced(page: &str) {
    const EMPTY: [&str; 2] = ["meta", "!doctype"];
    let mut open: Vec<&str> = Vec::new();
    for tag in page.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') && !EMPTY.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn a_hostile_file_writes_no_markup_into_any_report() {
    let hostile = "</style></code><script>alert(1)</script><img src=x onerror=alert(1)>\" onmouseover=\"alert(1)\u{7}";
    let mut file = File::of_data("hf_olmoe_bf16").with_string("producer", hostile).edit("o", |values| values.fill(0.0));
    file.tensor("dw2").name = hostile.into();
    let path = file.save("reports_<b>hostile & 'co'");
    let (page, xml) = (scratch("hostile.html"), scratch("hostile.xml"));
    let reports = ["--html", page.to_str().unwrap(), "--junit", xml.to_str().unwrap()];
    run(&[&reports[..], &[path.to_str().unwrap()]].concat());
    for report in [page, xml] {
        let text = std::fs::read_to_string(report).unwrap();
        assert!(text.contains("alert(1)"), "the name is shown");
        for markup in ["<script", "<img", "<b>", "\u{7}", "\" onmouseover=\""] {
            assert!(!text.contains(markup), "{markup:?}");
        }
        if text.starts_with("<!doctype") {
            assert_balanced(&text);
        }
    }
}

/// A run with every intermediate, by sums in f64: its numbers are the same on every machine.
fn with_intermediates(name: &str, pairing: Pairing) -> File {
    let case = Case::new("150,48,40,5,2".parse().unwrap()).with_biases().with_pairing(pairing).with_seed(8);
    let problem = case.problem::<bf16>().unwrap();
    let outcome = sonicmoe::run(&CpuEngine::<f64>::new(), &problem, Record::Intermediates).unwrap();
    let path = save(name, &[]);
    let metadata = Metadata { rounding_model: Some(RoundingModel::Fused), ..Metadata::default() };
    write(&path, &problem, &outcome.routing, &outcome.results, &metadata).unwrap();
    File::read(&path)
}

/// What a fault does to the numbers of one result, whose last axis is so long.
type Fault = (&'static str, fn(&mut Vec<f64>, usize));

const FAULTS: [Fault; 9] = [
    ("scaled by 1.015", |values, _| values.iter_mut().for_each(|value| *value *= 1.015)),
    ("zeros", |values, _| values.fill(0.0)),
    ("one sign", |values, width| values[3 * width + 5] *= -1.0),
    ("no number", |values, width| values[2 * width] = f64::NAN),
    ("a lost row", |values, width| values[5 * width..6 * width].fill(0.0)),
    ("a neighbour's row", |values, width| values.copy_within(6 * width..7 * width, 5 * width)),
    ("rows shifted", |values, width| values.rotate_right(width)),
    ("columns swapped", |values, width| values.chunks_mut(width).for_each(|row| row.swap(0, 1))),
    ("a tail left out", |values, width| values.chunks_mut(width).for_each(|row| row[width - 8..].fill(0.0))),
];

/// Everything that a report says of right files and of wrong ones: verdicts, places, ratios, statistics. Each of
/// them is claimed elsewhere, as far as it decides something; here no number moves by mistake.
#[test]
fn reports_are_what_they_were() {
    let mut named: Vec<(String, PathBuf)> = ["hf_olmoe_bf16", "hf_qwen3_f32", "hf_gptoss_bf16", "hf_dsv3_bf16"]
        .iter()
        .chain(&["sonic_topk_empty", "grouped_mm_a"])
        .map(|name| (name.to_string(), data(name)))
        .collect();
    let router = Pairing::Router { convention: Convention::SoftmaxOverTopK, load: Load::Biased };
    let whole = [("given", Pairing::TopK), ("router", router)]
        .map(|(name, pairing)| (name, with_intermediates(&format!("kept_{name}"), pairing)));
    let faulty = [("olmoe", File::of_data("hf_olmoe_bf16"), &["o", "dx", "dw1", "dw2"][..])]
        .into_iter()
        .chain(whole.iter().map(|(name, file)| (*name, file.clone(), &["o", "dw1", "h", "dh", "dx_expanded"][..])));
    for (of_file, file, results) in faulty {
        named.push((of_file.to_string(), file.save(&format!("kept_{of_file}"))));
        for (number, (fault, change)) in FAULTS.iter().enumerate() {
            // Each result has its turn.
            let result = results[number % results.len()];
            let mut file = file.clone();
            let width = *file.tensor(result).shape.last().unwrap();
            let name = format!("{of_file}, {result}: {fault}");
            let path = file.edit(result, |values| change(values, width)).save(&name.replace([' ', ':', ','], "_"));
            named.push((name, path));
        }
    }
    let mut documents = serde_json::Map::new();
    for (name, path) in named {
        let (_, text) = run(&["--json", path.to_str().unwrap()]);
        let mut document: Value = serde_json::from_str(&text).unwrap();
        document["files"][0]["path"] = Value::Null;
        documents.insert(name, document);
    }
    compare_documents(&Value::Object(documents), "reports.json", Tolerance(1e-6));
}
