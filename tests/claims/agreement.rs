//! The reference path and the SonicMoE path agree, over random shapes and routings.

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use sonicmoe::case::campaign::Fixed;
use sonicmoe::case::strategy::{Limits, any_case};
use sonicmoe::case::table::edge_cases;
use sonicmoe::case::{Case, Class};
use sonicmoe::oracle::Verdict;
use sonicmoe::reference::StandardMoe;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::verify::{Campaign, CaseId, Finding, Oracle, Section, Shard, Subject, agreement, campaign, examine};
use sonicmoe::{DType, Element, Engine};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("proptest-regressions/agreement.txt"))),
        ..ProptestConfig::default()
    }
}

/// What is wrong, one line per claim, and how to repeat it.
fn broken(case: &Case, engine: &str, findings: &[Finding]) -> Vec<String> {
    let failing = findings.iter().filter(|finding| finding.failing > 0);
    let line = |Finding { claim, explanation, .. }: &Finding| {
        let name = |engine| CaseId { case: case.clone(), engine, oracle: Oracle::of(claim) };
        let repeat = engine.parse().map_or(format!("{case} on {engine}"), |engine| format!("replay {}", name(engine)));
        format!("{}: {explanation}; {repeat}", claim.subject)
    };
    failing.map(line).collect()
}

fn faults<S: Element>(engine: &dyn Engine<S>, name: &str, case: &Case) -> Vec<String> {
    let problem = case.problem::<S>().expect("cases are drawn valid");
    broken(case, name, &examine(engine, &problem).expect("the engine takes every valid case").findings)
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn reference_and_sonicmoe_agree_in_f64(case in any_case(Limits::SMALL)) {
        let findings = agreement(&case.problem::<f64>()?)?;
        prop_assert_eq!(broken(&case, "cpu-f64", &findings), Vec::<String>::new());
    }
}

proptest! {
    #![proptest_config(config(48))]

    #[test]
    fn f64_passes_every_oracle(case in any_case(Limits::SMALL)) {
        prop_assert_eq!(faults::<f64>(&CpuEngine::<f64>::new(), "cpu-f64", &case), Vec::<String>::new());
    }

    #[test]
    fn f32_passes_every_oracle(case in any_case(Limits::SMALL)) {
        prop_assert_eq!(faults::<f32>(&CpuEngine::<f32>::new(), "cpu-f32", &case), Vec::<String>::new());
    }

    #[test]
    fn bf16_passes_every_oracle(case in any_case(Limits::SMALL)) {
        prop_assert_eq!(faults::<bf16>(&CpuEngine::<f32>::new(), "cpu-bf16", &case), Vec::<String>::new());
    }

    #[test]
    fn f16_passes_every_oracle(case in any_case(Limits::SMALL)) {
        prop_assert_eq!(faults::<f16>(&CpuEngine::<f32>::new(), "cpu-f16", &case), Vec::<String>::new());
    }

    #[test]
    fn f64_sums_over_bf16_storage_pass_every_oracle(case in any_case(Limits::SMALL)) {
        prop_assert_eq!(faults::<bf16>(&CpuEngine::<f64>::new(), "the CPU in bf16 with f64 sums", &case), Vec::<String>::new());
    }
}

#[test]
fn every_engine_passes_the_table_of_edge_cases() {
    let mut wrong = Vec::new();
    for row in edge_cases() {
        let engines: [(&str, Vec<String>); 5] = [
            ("f64", faults::<f64>(&CpuEngine::<f64>::new(), "cpu-f64", &row.case)),
            ("f32", faults::<f32>(&CpuEngine::<f32>::new(), "cpu-f32", &row.case)),
            ("bf16", faults::<bf16>(&CpuEngine::<f32>::new(), "cpu-bf16", &row.case)),
            ("f16", faults::<f16>(&CpuEngine::<f32>::new(), "cpu-f16", &row.case)),
            ("agreement", broken(&row.case, "cpu-f64", &agreement(&row.case.problem::<f64>().unwrap()).unwrap())),
        ];
        for (engine, faults) in engines {
            wrong.extend(faults.into_iter().map(|fault| format!("{} ({}), {engine}: {fault}", row.claim, row.case)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The standard layer rounds op by op and keeps more, so it passes all but the memory claim. Its steps
/// are not the eight kernels (its dlogits pass through exponentials and quotients), so claims about
/// single kernels do not concern it.
#[test]
fn standard_autograd_in_f32_is_within_the_eager_bounds_and_keeps_more() {
    for row in edge_cases() {
        let problem = row.case.problem::<f32>().unwrap();
        let mut findings = examine(&StandardMoe::<f32>::default(), &problem).unwrap().findings;
        findings.retain(|finding| finding.claim.section != Section::Kernel);
        let faults = broken(&row.case, "standard autograd in f32", &findings);
        let other: Vec<_> = faults.iter().filter(|fault| !fault.starts_with("kept:")).collect();
        assert!(other.is_empty(), "{} ({}): {other:?}", row.claim, row.case);
        let routed = problem.routed();
        assert_eq!(faults.len() - other.len(), usize::from(routed > 0), "{}: {faults:?}", row.claim);
    }
}

#[test]
fn a_campaign_meets_every_claim_and_draws_every_class_often_enough() {
    let plan =
        Campaign { seed: 1, first: 0, cases: 200, shard: Shard::WHOLE, fixed: Fixed::default(), dtype: DType::BF16 };
    let findings = campaign(&plan, Subject::Cpu, |_| {}).unwrap();
    let failures: Vec<_> = findings.failures.iter().map(|failure| &failure.finding.explanation).collect();
    assert_eq!(findings.verdict(), Verdict::Pass, "{failures:?}");
    for (claim, tally) in &findings.claims {
        assert!(tally.judged > 0, "no case met the claim: {}", claim.subject);
    }
    for class in Class::ALL {
        let drawn = findings.classes.get(&class).copied().unwrap_or(0);
        let share = if class == Class::Large { 10 } else { 20 };
        assert!(drawn * share >= plan.cases, "{}: {drawn} of {}", class.name(), plan.cases);
    }
}
