//! Copies of real runs, each with one fault: none may pass.

use super::edit::{File, Tensor};
use super::{REAL, check};
use sonicmoe::oracle::Verdict;

/// Every file with `change` applied fails with exit code 1 and names `output`.
fn each_fails(fault: &str, output: &str, change: impl Fn(File) -> File) {
    for (name, _) in REAL {
        let path = change(File::of_data(name)).save(&format!("{fault}_{name}").replace(' ', "_"));
        let checked = check(&path).unwrap_or_else(|error| panic!("{name}, {fault}: {error}"));
        let report = checked.report();
        assert_eq!(checked.verdict.code(), 1, "{name}, {fault}: {report}");
        let named = |line: &str| line.trim_start().starts_with(&format!("{output}: ")) && line.contains("worst at [");
        assert!(report.lines().any(named), "{name}, {fault}: {report}");
        std::fs::remove_file(path).unwrap();
    }
}

/// Rows of the last axis.
fn rows(tensor: &Tensor) -> usize {
    *tensor.shape.last().unwrap()
}

#[test]
fn zeros_fail_in_every_result() {
    for output in ["o", "dx", "dw1", "dw2"] {
        each_fails(&format!("zeros in {output}"), output, |file| file.edit(output, |values| values.fill(0.0)));
    }
}

#[test]
fn a_lost_row_fails() {
    each_fails("lost row", "o", |mut file| {
        let width = rows(file.tensor("o"));
        file.edit("o", |values| values[5 * width..6 * width].fill(0.0))
    });
}

#[test]
fn a_row_taken_from_its_neighbour_fails() {
    each_fails("neighbour row", "dx", |mut file| {
        let width = rows(file.tensor("dx"));
        file.edit("dx", |values| values.copy_within(6 * width..7 * width, 5 * width))
    });
}

#[test]
fn swapped_gate_and_up_fail() {
    each_fails("swapped gate", "dw1", |mut file| {
        let (halves, width) = (file.tensor("dw1").shape[1], rows(file.tensor("dw1")));
        let interleaved = file.strings["w1_layout"] == "interleaved_gate_first";
        let partner = |row: usize| if interleaved { row ^ 1 } else { (row + halves / 2) % halves };
        file.edit("dw1", |values| {
            let before = values.clone();
            for (index, value) in values.iter_mut().enumerate() {
                let (expert, row, column) = (index / (halves * width), index / width % halves, index % width);
                *value = before[(expert * halves + partner(row)) * width + column];
            }
        })
    });
}

#[test]
fn a_wrong_layout_fails() {
    for (name, _) in REAL {
        let file = File::of_data(name);
        let other = match file.strings["w1_layout"].as_str().unwrap() {
            "concatenated_gate_first" => "concatenated_up_first",
            _ => "concatenated_gate_first",
        };
        let path = file.with_string("w1_layout", other).save(&format!("layout_{name}"));
        assert_eq!(check(&path).unwrap().verdict, Verdict::NumericFailure, "{name}");
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_duplicated_stripe_of_columns_fails_and_is_located() {
    each_fails("stripe", "o", |mut file| {
        let width = rows(file.tensor("o"));
        file.edit("o", |values| values.chunks_mut(width).for_each(|row| row.copy_within(16..32, 32)))
    });
    let path = File::of_data("sonic_rounding_a")
        .edit("o", |values| values.chunks_mut(256).for_each(|row| row.copy_within(16..32, 32)))
        .save("located_stripe");
    let report = check(&path).unwrap().report();
    assert!(report.contains("in columns 32..48"), "{report}");
}

#[test]
fn a_doubled_expert_fails() {
    each_fails("doubled expert", "dw2", |mut file| {
        // The first expert has tokens in all files.
        let expert: usize = file.tensor("dw2").shape[1..].iter().product();
        file.edit("dw2", |values| values[..expert].iter_mut().for_each(|value| *value *= 2.0))
    });
}

#[test]
fn one_number_that_is_none_fails() {
    each_fails("nan", "dx", |file| file.edit("dx", |values| values[100] = f64::NAN));
    each_fails("infinity", "dw1", |file| file.edit("dw1", |values| values[100] = f64::INFINITY));
}

#[test]
fn one_flipped_sign_fails() {
    for output in ["o", "dw2"] {
        each_fails(&format!("flipped {output}"), output, |file| {
            file.edit(output, |values| {
                let largest = (0..values.len()).max_by(|&a, &b| values[a].abs().total_cmp(&values[b].abs())).unwrap();
                values[largest] = -values[largest];
            })
        });
    }
}

#[test]
fn one_number_in_an_expert_without_tokens_fails() {
    // Expert 3 of this file gets no token, so that its gradients are exactly 0.
    let path = File::of_data("sonic_topk_empty")
        .edit("dw2", |values| {
            let expert = values.len() / 8;
            assert!(values[3 * expert..4 * expert].iter().all(|value| *value == 0.0));
            values[3 * expert + 7] = 1e-30;
        })
        .save("empty_expert");
    let checked = check(&path).unwrap();
    assert_eq!(checked.verdict, Verdict::NumericFailure);
    assert!(checked.report().contains("worst at [3, 0, 7]"), "{}", checked.report());
}

#[test]
fn a_fused_run_declared_eager_has_to_be_right_all_the_same() {
    let file = File::of_data("sonic_rounding_a").with_string("rounding_model", "eager");
    let mut file = file.edit("ds", |values| values.iter_mut().for_each(|value| *value *= 1.5));
    assert_eq!(check(&file.clone().save("eager_ds")).unwrap().verdict, Verdict::NumericFailure);
    let scores = file.tensor("scores").values();
    file.tensor("scores").set(&scores.iter().map(|score| score * 1.25).collect::<Vec<_>>());
    assert_eq!(check(&file.save("eager_scores")).unwrap().verdict, Verdict::NumericFailure);
}
