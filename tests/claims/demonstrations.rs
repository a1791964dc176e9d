//! What the examples show, by running them.

#[allow(dead_code)]
#[path = "../../examples/third_party.rs"]
mod third_party;
#[allow(dead_code)]
#[path = "../../examples/zeros_pass_upstream.rs"]
mod zeros_pass_upstream;

use sonicmoe::oracle::Verdict;
use sonicmoe::verify::Section;
use zeros_pass_upstream::zeros;

#[test]
fn an_all_zero_kernel_passes_upstreams_tolerances_and_fails_here_in_every_result() {
    // d and n of upstream's first size; fewer tokens and experts.
    for compared in zeros("16,768,256,4,2").unwrap() {
        assert_eq!(compared.rejected_upstream, 0, "{compared:?}");
        assert!(compared.largest < compared.tolerance / 10.0, "{compared:?}");
        assert!(compared.rejected_here > compared.elements / 4 && compared.ratio > 2.0, "{compared:?}");
    }
}

#[test]
fn a_layer_of_somebody_elses_goes_through_the_whole_suite() {
    let report = third_party::report().unwrap();
    assert_eq!(report.verdict(), Verdict::Pass, "{report}");
    for section in [Section::Layer, Section::ExactRegime, Section::Laws, Section::Museum] {
        let met = report.claims.iter().filter(|(claim, tally)| claim.section == section && tally.met());
        assert!(met.count() >= 4, "{section:?}: {report}");
    }
    assert!(report.skipped.iter().any(|(problem, _)| problem == "beyond-32-bits"));
}

#[test]
fn the_third_party_example_has_fewer_than_60_lines() {
    let lines = include_str!("../../examples/third_party.rs").lines().filter(|line| !line.trim().is_empty());
    assert!(lines.filter(|line| !line.starts_with("//")).count() < 60);
}
