//! The planted bugs: each is caught, by the oracle named for it, and no correct run is.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use sonicmoe::Mutant;
use sonicmoe::score::{Comparator, Oracle, Regime, Score, score};

static SCORE: LazyLock<Score> = LazyLock::new(|| score("67,40,24,5,2".parse().unwrap(), 0).unwrap());

#[test]
fn every_planted_bug_is_caught() {
    assert_eq!(SCORE.survivors(), []);
    let faults = SCORE.mutants.keys().filter(|&&mutant| SCORE.equivalent(mutant).is_none()).count();
    assert!(faults >= 45, "{faults} faults");
}

#[test]
fn no_oracle_rejects_the_correct_engine() {
    assert_eq!(SCORE.wrongly_rejected(), []);
}

#[test]
fn each_planted_bug_dies_by_the_oracle_named_for_it_at_unit_scale_or_in_the_regime_made_for_it() {
    let mut elsewhere = Vec::new();
    for (&mutant, fates) in &SCORE.mutants {
        let unit = [Regime::Unit, Regime::Clamped, Regime::Grouped, Regime::Routing];
        let Some(fate) = unit.iter().map(|regime| &fates[regime]).find(|fate| fate.equivalent.is_none()) else {
            continue;
        };
        if !fate.oracles.contains(&Oracle::expected(mutant)) {
            elsewhere.push((mutant, Oracle::expected(mutant), fate.oracles.clone()));
        }
    }
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
}

#[test]
fn only_the_same_function_by_another_formula_is_no_fault() {
    let equivalent: Vec<Mutant> =
        SCORE.mutants.keys().copied().filter(|&mutant| SCORE.equivalent(mutant).is_some()).collect();
    assert_eq!(equivalent, [Mutant::Renormalized]);
}

#[test]
fn every_oracle_catches_something_and_none_catches_all() {
    let killers: Vec<BTreeSet<Oracle>> = SCORE.mutants.keys().map(|&mutant| SCORE.killers(mutant)).collect();
    for oracle in Oracle::ALL {
        let caught = killers.iter().filter(|killers| killers.contains(&oracle)).count();
        assert!(0 < caught && caught < killers.len() - 1, "{oracle:?} catches {caught}");
    }
}

#[test]
fn an_all_zero_output_passes_upstream_s_own_test_and_none_of_ours() {
    let zero = &SCORE.mutants[&Mutant::ZeroOutput][&Regime::Small];
    assert!(!zero.comparators.contains(&Comparator::SonicMoe));
    assert!([Oracle::Kernel, Oracle::Bound, Oracle::Twin].iter().all(|oracle| zero.oracles.contains(oracle)));
}

#[test]
fn the_readme_shows_the_score_as_it_is_printed() {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let (_, rest) = readme.split_once("<!-- sonicmoe score --markdown -->\n").expect("the first mark");
    let (shown, _) = rest.split_once("<!-- end of the score -->").expect("the second mark");
    let printed = SCORE.markdown();
    assert!(
        shown.trim() == printed.trim(),
        "put what `sonicmoe score --markdown` prints between the marks of the README:\n{printed}"
    );
}
