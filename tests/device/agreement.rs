//! The CUDA path agrees with the f64 truth within a-priori bounds: on every edge case, and on random
//! problems.

use std::sync::Mutex;

use half::bf16;
use rayon::prelude::*;

use sonicmoe::Activation;
use sonicmoe::case::Case;
use sonicmoe::case::campaign::{self, Fixed};
use sonicmoe::case::strategy::Limits;
use sonicmoe::case::table::edge_cases;

use crate::{Judged, engine_or_skip, own_settings, run_and_judge};

/// Sizes around tile edges, small enough for the f64 truth of hundreds of problems.
const LIMITS: Limits = Limits { tokens: 300, width: 264, experts: 17, ..Limits::DEVICE };

#[test]
fn every_edge_case_is_within_its_bounds() {
    let engine = engine_or_skip!();
    let failures: Vec<String> = edge_cases()
        .par_iter()
        .filter(|edge| Activation::WITH_KERNELS.contains(&edge.case.activation))
        .filter_map(|edge| {
            let problem = edge.case.problem::<bf16>().unwrap();
            let engines = [engine.clone(), engine.tuned(own_settings())];
            let failure = engines.iter().find_map(|engine| run_and_judge(engine, &problem).err())?;
            Some(format!("{} ({}): {failure}", edge.claim, edge.case))
        })
        .collect();
    assert!(failures.is_empty(), "{} edge cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// `SONICMOE_DEVICE_CASES` problems, 500 unless set, every second one with the kernels' own settings; the message
/// names the case to repeat.
#[test]
fn random_problems_are_within_their_bounds() {
    let engine = engine_or_skip!();
    let cases = std::env::var("SONICMOE_DEVICE_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(500u64);
    let judged = Mutex::new(Judged::default());
    let failures: Vec<String> = (0..cases)
        .into_par_iter()
        .filter_map(|index| {
            let case = campaign::case(20_260_301, index, LIMITS, Fixed::default());
            let problem = case.problem::<bf16>().unwrap();
            let engine = if index % 2 == 0 { engine.clone() } else { engine.tuned(own_settings()) };
            match run_and_judge(&engine, &problem) {
                Ok((_, found)) => {
                    let mut judged = judged.lock().unwrap();
                    *judged = judged.and(found);
                    None
                }
                Err(failure) => Some(format!("{case}: {failure}")),
            }
        })
        .collect();
    assert!(failures.is_empty(), "{} of {cases} fail:\n{}", failures.len(), failures.join("\n"));
    let Judged { elements, kernel_ratio, layer_ratio } = judged.into_inner().unwrap();
    assert!(elements > 0);
    eprintln!(
        "{cases} problems, {elements} elements; worst error over bound: {kernel_ratio:.3} by kernel, {layer_ratio:.3} \
         over the layer"
    );
}

#[test]
fn an_expert_without_tokens_gets_zero_gradients_wherever_it_stands() {
    let engine = engine_or_skip!();
    for empty in 0..5 {
        for biases in [false, true] {
            let mut counts = [130, 1, 64, 17, 128];
            counts[empty] = 0;
            let case = Case { biases, ..Case::new("0,72,136,5,1".parse().unwrap()) }.with_counts(&counts);
            let problem = case.problem::<bf16>().unwrap();
            for engine in [engine.clone(), engine.tuned(own_settings())] {
                run_and_judge(&engine, &problem).unwrap_or_else(|failure| panic!("{case}: {failure}"));
            }
        }
    }
}

#[test]
fn widths_beyond_one_tile_and_many_rows_an_expert() {
    let engine = engine_or_skip!();
    for (shape, seed) in [("1100,512,520,4,2", 1), ("700,776,264,3,1", 2), ("513,264,1032,6,2", 3)] {
        let case = Case::new(shape.parse().unwrap()).with_seed(seed).with_biases();
        let problem = case.problem::<bf16>().unwrap();
        for engine in [engine.clone(), engine.tuned(own_settings())] {
            run_and_judge(&engine, &problem).unwrap_or_else(|failure| panic!("{case}: {failure}"));
        }
    }
}

/// Edge cases, the exact regime bit for bit, the laws and the museum: what every engine is fed.
#[test]
fn the_whole_suite_holds_on_the_device() {
    let engine = engine_or_skip!();
    let report = sonicmoe::verify::suite(engine).unwrap();
    eprintln!("{report}");
    assert_eq!(report.verdict(), sonicmoe::oracle::Verdict::Pass, "{report}");
    let exact = report.claims.iter().filter(|(claim, _)| claim.section == sonicmoe::verify::Section::ExactRegime);
    assert!(exact.map(|(_, tally)| tally.judged).sum::<u64>() > 0, "nothing of the exact regime was judged");
}
