//! Wrong copies of real runs are explained by what was done to them.

use super::REAL;
use super::edit::{File, data};
use sonicmoe::Mutant;
use sonicmoe::cli::conventions::Conventions;
use sonicmoe::cli::explain::{ExplainArgs, Explained, explain_file};
use sonicmoe::oracle::Verdict;
use sonicmoe::score::explain::Fault;

fn explained(path: &std::path::Path) -> Explained {
    let file = path.to_owned();
    let args = ExplainArgs { file, conventions: Conventions::default(), rounding_model: None, json: false };
    explain_file(&args).unwrap()
}

/// The first cause of a wrong copy.
fn first_cause(name: &str, what: &str, change: impl FnOnce(File) -> File) -> Fault {
    let path = change(File::of_data(name)).save(&format!("explained_{what}"));
    let explained = explained(&path);
    std::fs::remove_file(path).unwrap();
    let text = explained.text();
    assert_eq!(explained.checked.verdict, Verdict::NumericFailure, "{what}: {text}");
    assert!(text.contains("1. "), "{what}: {text}");
    explained.causes.first().unwrap_or_else(|| panic!("{what}: {text}")).fault
}

#[test]
fn a_run_that_passes_needs_no_explanation() {
    for (name, _) in REAL {
        let explained = explained(&data(name));
        assert!(explained.causes.is_empty() && explained.text().contains("nothing needs explaining"), "{name}");
    }
}

#[test]
fn zeros_are_named() {
    let zeros = first_cause("hf_olmoe_bf16", "zeros", |file| file.edit("o", |values| values.fill(0.0)));
    assert_eq!(zeros, Fault::Known(Mutant::ZeroOutput));
}

#[test]
fn a_wrong_order_of_gate_and_up_is_named() {
    let swapped = first_cause("hf_qwen3_f32", "layout", |file| file.with_string("w1_layout", "concatenated_up_first"));
    assert_eq!(swapped, Fault::Known(Mutant::GateUpSwapped));
}

#[test]
fn a_doubled_gradient_is_named() {
    let doubled = first_cause("scattermoe_a", "doubled", |file| {
        file.edit("dw2", |values| values.iter_mut().for_each(|value| *value *= 2.0))
    });
    assert!(matches!(doubled, Fault::Known(Mutant::Dw2Doubled) | Fault::Scaled(sonicmoe::engine::Output::Dw2, _)));
}

#[test]
fn a_stripe_of_columns_is_named() {
    let stripe = first_cause("sonic_topk_empty", "stripe", |file| {
        file.edit("o", |values| values.chunks_mut(256).for_each(|row| row.copy_within(0..16, 16)))
    });
    assert_eq!(stripe, Fault::Known(Mutant::StripeInY));
}

#[test]
fn a_scale_error_of_four_percent_is_measured() {
    let scaled = first_cause("grouped_mm_a", "scaled", |file| {
        file.edit("dx", |values| values.iter_mut().for_each(|value| *value *= 1.04))
    });
    match scaled {
        Fault::Scaled(output, beta) => {
            assert_eq!(output.name(), "dx");
            assert!((beta - 0.04).abs() < 0.002, "{beta}");
        }
        other => panic!("{other:?}"),
    }
}
