//! A failing case has a name that repeats it, and becomes small without becoming another.

use std::borrow::Cow;
use std::path::Path;

use half::bf16;
use ndarray::ArrayView2;
use sonicmoe::case::Case;
use sonicmoe::case::campaign::{Fixed, case};
use sonicmoe::case::strategy::Limits;
use sonicmoe::cli::check::{CheckArgs, check_file};
use sonicmoe::engine::{Forward, Numerics, Output};
use sonicmoe::mutant::Mutant;
use sonicmoe::oracle::Verdict;
use sonicmoe::routing::Routing;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::verify::{
    Campaign, CaseId, EngineName, Findings, Oracle, Section, Shard, Subject, campaign, shrink, shrink_case,
    shrink_values,
};
use sonicmoe::{DType, Engine, Problem, Record, Result, Shape};

const ENGINES: [EngineName; 6] = [
    EngineName::Mutant(DType::BF16, Mutant::ScoresOff),
    EngineName::Cpu(DType::F64),
    EngineName::Cpu(DType::F32),
    EngineName::Cpu(DType::BF16),
    EngineName::Cpu(DType::F16),
    EngineName::Cuda,
];

fn oracles() -> Vec<Oracle> {
    let of = |section, subject: &str| Oracle { section, subject: subject.into() };
    vec![
        of(Section::Agreement, "dx"),
        of(Section::Kernel, "4-down-backward-activation-ds"),
        of(Section::Layer, "drouter_w"),
        of(Section::ExactRegime, "dw1"),
        of(Section::Laws, "dout-times-a-power-of-two"),
        of(Section::Exact, "a-second-run-gives-the-same-bits"),
    ]
}

fn drawn(index: u64) -> Case {
    case(11, index, Limits::SMALL, Fixed::default())
}

#[test]
fn the_name_of_any_case_is_read_back_as_that_case() {
    for index in 0..400 {
        let engine = ENGINES[index as usize % ENGINES.len()];
        let oracle = oracles().swap_remove(index as usize % 6);
        let id = CaseId { case: drawn(index), engine, oracle };
        let text = id.to_string();
        assert_eq!(text.parse::<CaseId>().unwrap(), id, "{text}");
        // It can be copied into a shell as it is.
        let plain = |character: char| character.is_ascii_alphanumeric() || "/,.+-_:=".contains(character);
        assert!(text.chars().all(plain), "{text}");
    }
}

#[test]
fn a_name_that_is_none_is_refused_with_the_reason() {
    let right = "1/33,16,24,5,2/swiglu+biases/topk_over_softmax,zipf/unit/7/cpu-bf16/layer:dx";
    assert!(right.parse::<CaseId>().is_ok());
    for (part, other, reason) in [
        ("1/", "2/", "form 1"),
        ("/unit", "", "7 parts"),
        ("5,2", "5,6", "K = 6"),
        ("swiglu", "swish", "swish"),
        ("zipf", "without.1.x", "names no routing"),
        ("topk_over_softmax,zipf", "counts1.2", "names no routing"),
        ("unit", "huge", "scale"),
        ("/7/", "/-7/", "seed"),
        ("cpu-bf16", "tpu-bf16", "engine"),
        ("layer:dx", "layer", "section:subject"),
        ("layer:dx", "layer:d x", "names no claim"),
        ("layer:dx", "roof:dx", "section"),
    ] {
        let text = right.replacen(part, other, 1);
        let error = text.parse::<CaseId>().unwrap_err().to_string();
        assert!(error.contains(reason), "{text}: {error}");
    }
}

#[test]
fn a_replay_gives_the_same_bits_for_any_number_of_threads_and_other_bits_for_another_seed() {
    let text = "1/33,16,24,5,2/swiglu+biases/topk_over_softmax,zipf/unit/7/cpu-bf16/layer:dx";
    let replay = |text: &str, threads: usize| {
        let id: CaseId = text.parse().unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| id.replay().unwrap())
    };
    let first = replay(text, 1);
    assert!(!first.fails() && first.finding.as_ref().unwrap().judged == 33 * 16);
    for threads in [1, 3] {
        let again = replay(text, threads);
        assert_eq!(again.fingerprint, first.fingerprint);
        assert_eq!(format!("{:?}", again.finding), format!("{:?}", first.finding));
    }
    assert_ne!(replay(&text.replace("/7/", "/8/"), 1).fingerprint, first.fingerprint);
    assert!(replay(&text.replace("layer:dx", "layer:nothing"), 1).finding.is_none());
    assert!(replay(&text.replace("layer:dx", "agreement:dx"), 1).finding.is_some());
}

/// Loses the sign of o in column 8 from token 16 on.
struct Faulty(CpuEngine<f32>);

impl Engine<bf16> for Faulty {
    fn name(&self) -> Cow<'static, str> {
        "faulty".into()
    }

    fn numerics(&self) -> Numerics {
        Engine::<bf16>::numerics(&self.0)
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, bf16>, record: Record) -> Result<Forward<'p, bf16>> {
        let mut forward = self.0.forward(problem, record)?;
        let late = forward.o.rows_mut().into_iter().skip(16);
        late.for_each(|mut row| row.iter_mut().skip(8).take(1).for_each(|value| *value = -*value));
        Ok(forward)
    }
}

#[test]
fn the_smallest_case_that_meets_a_fault_has_just_the_sizes_that_it_needs() {
    let (engine, oracle) = (Faulty(CpuEngine::new()), Oracle { section: Section::Layer, subject: "o".into() });
    let fails = |problem: &Problem<'_, bf16>| oracle.judge(&engine, problem).unwrap().fails();
    for large in [
        Case::new("65,33,24,7,3".parse().unwrap()).with_seed(5).with_biases(),
        Case::new("8,40,17,1,1".parse().unwrap()).with_counts(&[20, 0, 64, 3]),
    ] {
        assert!(fails(&large.problem().unwrap()));
        let small = shrink_case(&large, |case| case.problem().is_ok_and(|problem| fails(&problem)));
        let shape = small.shape;
        assert_eq!((shape.t, shape.d, shape.n, shape.e, shape.k), (17, 9, 1, 1, 1), "{small}");
        assert!(!small.biases && small.seed == 0, "{small}");
        let whole = small.problem::<bf16>().unwrap();
        let simple = shrink_values(&whole, 400, fails).unwrap();
        assert!(fails(&simple));
        let nonzero = |values: ArrayView2<'_, bf16>| values.iter().filter(|value| **value != bf16::ZERO).count();
        // Only the token and the column of the fault matter to o, and dout to nothing in it.
        assert_eq!((nonzero(whole.x()), nonzero(whole.dout())), (17 * 9, 17 * 9));
        assert!(nonzero(simple.x()) <= 9 && nonzero(simple.dout()) == 0, "{}", nonzero(simple.x()));
    }
}

#[test]
fn a_planted_bug_fails_again_by_its_name_and_shrinks_to_a_dump_that_fails() {
    let text = "1/40,33,24,5,2/swiglu+biases/given/unit/5/cpu-bf16+B2Unweighted/layer:o";
    let id: CaseId = text.parse().unwrap();
    assert!(id.replay().unwrap().fails());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shrunk.safetensors");
    let small = shrink(&id, Some(&path)).unwrap();
    // One less of anything, and it is no longer seen.
    let Shape { t, d, n, .. } = small.id.case.shape;
    assert!(t * d * n < 40 * 33 * 24, "{}", small.id);
    for shape in [
        Shape { t: t - 1, ..small.id.case.shape },
        Shape { d: d - 1, ..small.id.case.shape },
        Shape { n: n - 1, ..small.id.case.shape },
    ] {
        if shape.t > 0 && shape.d > 0 && shape.n > 0 {
            let less = CaseId { case: Case { shape, ..small.id.case.clone() }, ..small.id.clone() };
            assert!(!less.replay().unwrap().fails(), "{less}");
        }
    }
    assert!(small.id.case.biases && small.id.replay().unwrap().fails());
    assert!(small.nonzeros[1] < small.nonzeros[0] && !small.explanation.is_empty());
    let only = CheckArgs { only: vec![Output::O], ..CheckArgs::default() };
    assert_eq!(check_file(&path, &only).unwrap().verdict, Verdict::NumericFailure);
    let sound = text.replace("+B2Unweighted", "");
    assert!(shrink(&sound.parse().unwrap(), None).unwrap_err().to_string().contains("does not fail"));
    assert!(text.replace("B2Unweighted", "B2Forgotten").parse::<CaseId>().is_err());
}

#[test]
fn an_exhibit_of_the_museum_is_replayed_by_its_name() {
    let id: CaseId = "1/museum:column-tail/cpu-bf16".parse().unwrap();
    assert_eq!(id, CaseId::of_exhibit("column-tail", EngineName::Cpu(DType::BF16)).unwrap());
    assert_eq!(id.to_string(), "1/museum:column-tail/cpu-bf16");
    let replay = id.replay().unwrap();
    assert!(!replay.fails() && replay.finding.unwrap().judged > 1000);
    assert!("1/museum:dinosaur/cpu-bf16".parse::<CaseId>().is_err());
    assert!(shrink(&id, None).is_err());
}

#[test]
fn a_case_that_cannot_get_smaller_stays_what_it_is() {
    let case = drawn(3);
    assert_eq!(shrink_case(&case, |other| *other == case), case);
}

/// Everything that a campaign counts.
fn counted(findings: &[Findings]) -> Vec<(String, u64, u64, u64)> {
    let mut sums = std::collections::BTreeMap::new();
    for (claim, tally) in findings.iter().flat_map(|findings| &findings.claims) {
        let sum = sums.entry(claim.clone()).or_insert((0, 0, 0));
        *sum = (sum.0 + tally.cases, sum.1 + tally.judged, sum.2 + tally.skipped);
    }
    sums.into_iter().map(|(claim, (cases, judged, skipped))| (format!("{claim:?}"), cases, judged, skipped)).collect()
}

#[test]
fn the_shards_of_a_campaign_are_disjoint_and_together_the_campaign() {
    let drawn = |shard: Shard| {
        let fixed = Fixed { shape: Some("9,8,8,3,2".parse().unwrap()), activation: None };
        let plan = Campaign { seed: 5, first: 2, cases: 11, shard, fixed, dtype: DType::F32 };
        campaign(&plan, Subject::Cpu, |_| {}).unwrap()
    };
    let whole = drawn(Shard::WHOLE);
    let parts: Vec<Findings> = ["1/3", "2/3", "3/3"].map(|part| drawn(part.parse().unwrap())).into();
    assert_eq!(parts.iter().map(|part| part.cases).collect::<Vec<_>>(), [4, 3, 4]);
    assert_eq!(parts.iter().map(|part| part.cases).sum::<u64>(), whole.cases);
    assert_eq!(counted(&parts), counted(&[whole]));
}

#[test]
fn a_routing_survives_its_case_s_name() {
    let id: CaseId = "1/17,8,8,3,1/silu/counts.16.0.1/unit/0/cpu-f32/layer:o".parse().unwrap();
    let problem = id.case.problem::<f32>().unwrap();
    let sonicmoe::Gating::Given { routing, .. } = problem.gating() else { panic!("counts give pairs") };
    assert_eq!(Routing::tokens_per_expert(routing), [16, 0, 1]);
}
