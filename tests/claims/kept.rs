//! Numbers as they were when a file under version control was written. `SONICMOE_UPDATE_SNAPSHOT=1` writes it
//! again after a change that was meant.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// A file among the tests' data.
fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn is_written_again() -> bool {
    std::env::var_os("SONICMOE_UPDATE_SNAPSHOT").is_some()
}

fn read(name: &str) -> String {
    std::fs::read_to_string(data(name)).unwrap_or_else(|error| panic!("tests/data/{name}: {error}"))
}

/// How far two numbers may be apart, absolutely below 1 and relatively above: sums on other machines take other
/// orders.
#[derive(Clone, Copy)]
pub struct Tolerance(pub f64);

impl Tolerance {
    fn holds(self, found: f64, kept: f64) -> bool {
        (found - kept).abs() <= self.0 * kept.abs().max(1.0)
    }
}

/// Some numbers by name.
#[derive(Default)]
pub struct Kept(BTreeMap<String, Vec<f64>>);

impl Kept {
    pub fn keep(&mut self, name: String, numbers: impl IntoIterator<Item = f64>) {
        let numbers = numbers.into_iter().collect();
        assert!(self.0.insert(name.clone(), numbers).is_none(), "{name} twice");
    }

    /// Every number is that of the file, and none is missing.
    pub fn compare(&self, file: &str, tolerance: Tolerance) {
        if is_written_again() {
            std::fs::write(data(file), self.to_text()).unwrap();
        }
        let moved = self.moved(&read(file), tolerance);
        assert!(moved.is_empty(), "tests/data/{file}, {} of {}:\n{}", moved.len(), self.0.len(), moved.join("\n"));
    }

    fn to_text(&self) -> String {
        let mut text = String::new();
        for (name, numbers) in &self.0 {
            let numbers: Vec<String> = numbers.iter().map(|number| format!("{number:.10}")).collect();
            writeln!(text, "{name}: {}", numbers.join(" ")).unwrap();
        }
        text
    }

    fn moved(&self, text: &str, tolerance: Tolerance) -> Vec<String> {
        let mut kept: BTreeMap<&str, Vec<f64>> = text
            .lines()
            .map(|line| line.rsplit_once(": ").unwrap())
            .map(|(name, numbers)| (name, numbers.split(' ').map(|number| number.parse().unwrap()).collect()))
            .collect();
        let mut moved = Vec::new();
        for (name, found) in &self.0 {
            let kept = kept.remove(name.as_str()).unwrap_or_default();
            let holds = |(&found, &kept)| tolerance.holds(found, kept);
            if found.len() != kept.len() || !found.iter().zip(&kept).all(holds) {
                moved.push(format!("{name}: {found:?}, kept {kept:?}"));
            }
        }
        moved.extend(kept.into_keys().map(|name| format!("{name} is missing")));
        moved
    }
}

/// A JSON document is that of the file, with numbers within `tolerance`.
pub fn compare_documents(found: &Value, file: &str, tolerance: Tolerance) {
    if is_written_again() {
        std::fs::write(data(file), in_lines(found)).unwrap();
    }
    let kept: Value = serde_json::from_str(&read(file)).unwrap();
    let mut differences = Vec::new();
    compare_values("", found, &kept, tolerance, &mut differences);
    assert!(differences.is_empty(), "tests/data/{file}, {}:\n{}", differences.len(), differences.join("\n"));
}

/// A document with a line for each of its parts.
fn in_lines(document: &Value) -> String {
    let Value::Object(parts) = document else { return document.to_string() };
    let lines: Vec<String> =
        parts.iter().map(|(name, part)| format!("{}:{part}", Value::from(name.as_str()))).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

fn compare_values(at: &str, found: &Value, kept: &Value, tolerance: Tolerance, differences: &mut Vec<String>) {
    match (found, kept) {
        (Value::Object(found), Value::Object(kept)) if found.keys().eq(kept.keys()) => {
            for (name, found) in found {
                compare_values(&format!("{at}/{name}"), found, &kept[name], tolerance, differences);
            }
        }
        (Value::Array(found), Value::Array(kept)) if found.len() == kept.len() => {
            for (place, (found, kept)) in found.iter().zip(kept).enumerate() {
                compare_values(&format!("{at}/{place}"), found, kept, tolerance, differences);
            }
        }
        (Value::Number(f), Value::Number(k)) if tolerance.holds(f.as_f64().unwrap(), k.as_f64().unwrap()) => {}
        _ if found == kept => {}
        _ => differences.push(format!("{at}: {found}, kept {kept}")),
    }
}

#[test]
fn a_number_that_moves_and_one_that_is_missing_are_named() {
    let mut found = Kept::default();
    found.keep("one".into(), [1.0, 1e-3]);
    found.keep("two".into(), [2e3]);
    let text = found.to_text();
    let moved = |text: &str| found.moved(text, Tolerance(1e-8));
    assert!(moved(&text).is_empty());
    assert!(moved(&text.replace("2000.0000000000", "2000.0000100000")).is_empty());
    assert_eq!(moved(&text.replace("2000.0000000000", "2000.0001000000")).len(), 1);
    assert_eq!(moved(&text.replace("0.0010000000", "0.0010000200")), ["one: [1.0, 0.001], kept [1.0, 0.00100002]"]);
    assert_eq!(moved(&text.replace("two", "three")), ["two: [2000.0], kept []", "three is missing"]);
    assert_eq!(moved(&format!("{text}three: 1\n")), ["three is missing"]);
}

#[test]
fn a_value_of_a_document_that_moves_is_named_by_its_place() {
    let kept = serde_json::json!({ "a": [1.0, "word", null], "b": { "c": 2 } });
    let differences = |change: &dyn Fn(&mut Value)| {
        let (mut found, mut differences) = (kept.clone(), Vec::new());
        change(&mut found);
        compare_values("", &found, &kept, Tolerance(1e-6), &mut differences);
        differences
    };
    assert!(differences(&|_| ()).is_empty());
    assert!(differences(&|found| found["b"]["c"] = (2.000_001).into()).is_empty());
    assert_eq!(differences(&|found| found["b"]["c"] = 3.into()), ["/b/c: 3, kept 2"]);
    assert_eq!(differences(&|found| found["a"][1] = "other".into()), ["/a/1: \"other\", kept \"word\""]);
    assert_eq!(differences(&|found| found["a"][2] = 0.into()), ["/a/2: 0, kept null"]);
    assert_eq!(differences(&|found| found["a"] = Value::Array(Vec::new())).len(), 1);
    assert_eq!(differences(&|found| found["new"] = Value::Null).len(), 1);
}
