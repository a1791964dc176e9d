//! Laws and buffers: what is known of two runs without knowing the truth of either.

use std::borrow::Cow;
use std::cell::Cell;
use std::sync::LazyLock;

use half::bf16;
use ndarray::ArrayView2;
use sonicmoe::case::campaign::Fixed;
use sonicmoe::case::{Case, Pairing, Scale};
use sonicmoe::engine::{Backward, Forward, Gradients, Ledger, Numerics, Output, Pass};
use sonicmoe::oracle::buffers::{Guarded, Violation, examine};
use sonicmoe::routing::Routing;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::verify::{Campaign, Claim, Section, Shard, Subject, campaign, laws, suite};
use sonicmoe::{DType, Element, Engine, Problem, Record, Result, run};

fn case(seed: u64) -> Case {
    let case = Case::new("33,16,24,5,2".parse().unwrap()).with_pairing(Pairing::TopK).with_scale(Scale::Exact);
    case.with_biases().with_seed(seed)
}

type Fault = fn(&Problem<'_, bf16>, &mut Gradients<bf16>, u32);

/// The CPU path with a fault in its gradients; the fault is told how many backwards there have been.
struct Faulty(Fault);

struct FaultyPass<'p, 'q> {
    fault: Fault,
    problem: &'p Problem<'q, bf16>,
    pass: Box<dyn Pass<bf16> + 'p>,
    backwards: Cell<u32>,
}

fn cpu() -> &'static CpuEngine<f32> {
    static ENGINE: LazyLock<CpuEngine<f32>> = LazyLock::new(CpuEngine::new);
    &ENGINE
}

impl Engine<bf16> for Faulty {
    fn name(&self) -> Cow<'static, str> {
        "faulty".into()
    }

    fn numerics(&self) -> Numerics {
        Engine::<bf16>::numerics(cpu())
    }

    fn forward<'p>(&'p self, problem: &'p Problem<'_, bf16>, record: Record) -> Result<Forward<'p, bf16>> {
        let forward = cpu().forward(problem, record)?;
        let pass = Box::new(FaultyPass { fault: self.0, problem, pass: forward.pass, backwards: Cell::new(0) });
        Ok(Forward { pass, ..forward })
    }
}

impl Pass<bf16> for FaultyPass<'_, '_> {
    fn routing(&self) -> &Routing {
        self.pass.routing()
    }

    fn scores(&self) -> Vec<f32> {
        self.pass.scores()
    }

    fn logits(&self) -> Option<ArrayView2<'_, f32>> {
        self.pass.logits()
    }

    fn kept(&self) -> Ledger {
        self.pass.kept()
    }

    fn backward(&self, dout: ArrayView2<'_, bf16>, record: Record) -> Result<Backward<bf16>> {
        let mut backward = self.pass.backward(dout, record)?;
        (self.fault)(self.problem, &mut backward.gradients, self.backwards.replace(self.backwards.get() + 1));
        Ok(backward)
    }
}

fn broken_by(fault: Fault) -> Vec<String> {
    let findings = laws(&Faulty(fault), &case(1).problem().unwrap()).unwrap();
    findings.into_iter().filter(|finding| finding.failing > 0).map(|finding| finding.claim.subject.into()).collect()
}

#[track_caller]
fn breaks(law: &str, fault: Fault) {
    let broken = broken_by(fault);
    assert!(broken.iter().any(|other| other == law), "{broken:?}");
}

fn double(value: &mut bf16) {
    *value = bf16::from_f32(2.0 * value.to_f32());
}

#[test]
fn the_cpu_path_keeps_every_law_in_every_storage_type() {
    fn check<S: Element>() {
        for seed in 0..4 {
            let findings = laws(&CpuEngine::<f32>::new(), &case(seed).problem::<S>().unwrap()).unwrap();
            assert_eq!(findings.len(), 8);
            for finding in findings {
                assert_eq!(finding.failing, 0, "{}: {}", finding.claim.subject, finding.explanation);
            }
        }
    }
    check::<bf16>();
    check::<half::f16>();
    check::<f32>();
    assert_eq!(broken_by(|_, _, _| {}), [""; 0]);
}

#[test]
fn a_backward_that_spends_what_was_kept_breaks_repetition() {
    breaks("backward gives the same bits again on one forward", |_, gradients, backwards| {
        if backwards > 0 {
            gradients.dx.iter_mut().for_each(double);
        }
    });
}

#[test]
fn state_between_two_problems_breaks_a_pass() {
    // Its own cell: tests run side by side.
    thread_local!(static RUNS: Cell<u32> = const { Cell::new(0) });
    breaks("a pass is not disturbed by another problem in between", |_, gradients, _| {
        if RUNS.replace(RUNS.get() + 1) == 2 {
            double(&mut gradients.dw2[[0, 0, 0]]);
        }
    });
}

#[test]
fn a_fault_of_one_place_in_the_batch_breaks_the_order_of_tokens() {
    breaks("tokens and pairs in reverse order", |_, gradients, _| gradients.dx.row_mut(0).iter_mut().for_each(double));
}

#[test]
fn a_fault_of_one_expert_breaks_their_labels() {
    breaks("experts relabelled", |_, gradients, _| {
        gradients.dw1.index_axis_mut(ndarray::Axis(0), 0).iter_mut().for_each(double);
    });
}

#[test]
fn a_constant_added_to_a_gradient_breaks_scaling_and_linearity() {
    let fault: Fault = |_, gradients, _| {
        gradients.dw2.iter_mut().for_each(|value| *value = bf16::from_f32(value.to_f32() + 64.0));
    };
    breaks("dout / 4 makes every gradient a quarter", fault);
    breaks("linear in dout", fault);
    breaks("T split in two adds the weight gradients", fault);
}

#[test]
fn a_pair_that_counts_though_its_score_is_0_breaks_its_removal() {
    breaks("a score of 0 removes its pair", |problem, gradients, _| {
        let pairs = problem.routed() as f32;
        gradients.dw2.iter_mut().for_each(|value| *value = bf16::from_f32(value.to_f32() * pairs));
    });
}

#[test]
fn the_whole_suite_passes_on_the_cpu_path() {
    let report = suite::<bf16>(cpu()).unwrap();
    assert_eq!(report.verdict().code(), 0, "{report}");
    assert_eq!(report.skipped.len(), 2, "{report}");
    for section in
        [Section::Kernel, Section::Layer, Section::ExactRegime, Section::Laws, Section::Museum, Section::Exact]
    {
        assert!(report.claims.keys().any(|claim| claim.section == section), "{section:?}");
    }
}

#[test]
fn a_faulty_engine_fails_the_suite_in_every_section_that_sees_results() {
    let report = suite(&Faulty(|_, gradients, _| {
        gradients.dw2.iter_mut().for_each(|value| *value = bf16::from_f32(1.125 * value.to_f32()));
    }))
    .unwrap();
    for section in [Section::Kernel, Section::Layer, Section::ExactRegime, Section::Museum] {
        assert!(report.failures.iter().any(|(_, finding)| finding.claim.section == section), "{section:?}");
    }
}

#[test]
fn a_campaign_shows_the_exact_regime_as_claims() {
    let plan =
        Campaign { seed: 5, first: 0, cases: 16, shard: Shard::WHOLE, fixed: Fixed::default(), dtype: DType::BF16 };
    let findings = campaign(&plan, Subject::Cpu, |_| ()).unwrap();
    assert_eq!(findings.verdict().code(), 0, "{:?}", findings.failures);
    assert_eq!(findings.cases, 16);
    for output in ["o", "dx", "dw1", "dw2", "ds"] {
        let claim = |claim: &&Claim| claim.section == Section::ExactRegime && claim.subject == output;
        let claim = findings.claims.keys().find(claim).unwrap();
        assert!(findings.claims[claim].cases >= 3, "{output}: {:?} of four exact cases", findings.claims[claim]);
    }
}

/// The right results of o and dw2, written into given memory but for some elements of dw2; then one more
/// element is written beside it.
fn violations(left_out: &[usize], stray: Option<isize>) -> Vec<Violation> {
    let problem = case(3).problem::<bf16>().unwrap();
    let results = run(cpu(), &problem, Record::Results).unwrap().results;
    let lengths = [Output::O, Output::Dw2].map(|output| (output, results[&output].values.len()));
    examine(&problem, &lengths, |buffers: &mut [Guarded<bf16>]| {
        for (buffer, (output, _)) in buffers.iter_mut().zip(lengths) {
            for (at, (into, &value)) in buffer.payload_mut().iter_mut().zip(&results[&output].values).enumerate() {
                if output == Output::O || !left_out.contains(&at) {
                    *into = bf16::from_f64(value);
                }
            }
        }
        if let Some(stray) = stray {
            // SAFETY: red zones of 256 elements lie on both sides of the payload.
            unsafe { buffers[1].as_mut_ptr().offset(stray).write(bf16::from_f32(3.0)) };
        }
        Ok(())
    })
    .unwrap()
}

#[test]
fn an_element_left_unwritten_or_written_beside_a_result_is_found() {
    assert_eq!(violations(&[], None), []);
    assert_eq!(violations(&[5, 9], None), [Violation::Unwritten { output: Output::Dw2, at: 5 }]);
    let length = 5 * 16 * 24;
    for beside in [-1, -256, length, length + 255] {
        let stray = Violation::Stray { output: Output::Dw2, at: beside as i64 };
        assert_eq!(violations(&[], Some(beside)), [stray], "{beside}");
    }
}
