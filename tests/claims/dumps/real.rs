//! What six runs of public implementations come to.

use sonicmoe::case::Case;
use sonicmoe::dump::{Dump, Metadata, Model, Overrides, Source, write};
use sonicmoe::engine::Output;
use sonicmoe::oracle::Verdict;
use sonicmoe::reference::run_with;
use sonicmoe::routing::Routing;
use sonicmoe::{Convention, ExpertId, Gating, Problem, Router, TokenId};

use super::edit::{File, data, save};
use super::{REAL, check};

#[test]
fn runs_of_four_public_implementations_pass_and_the_model_that_they_need_is_named() {
    for (name, model) in REAL {
        let checked = check(&data(name)).unwrap();
        assert_eq!(checked.verdict, Verdict::Pass, "{}", checked.report());
        assert_eq!(checked.model(), model, "{}", checked.report());
        assert!(checked.report().contains(model.words()), "{}", checked.report());
    }
}

#[test]
fn without_ids_and_logits_the_choice_is_inferred() {
    let path = File::of_data("sonic_topk_empty").without("router_logits").save("without_logits");
    let with = Dump::read(data("sonic_topk_empty"), &Overrides::default()).unwrap();
    let without = Dump::read(&path, &Overrides::default()).unwrap();
    let numerics = with.numerics(Model::FusedTensorRouter);
    let (with, without) = (with.choose(&numerics).unwrap(), without.choose(&numerics).unwrap());
    assert_eq!((with.source, without.source), (Source::Logits, Source::Computed));
    assert_eq!(with.routing.expert_offsets(), without.routing.expert_offsets());
    assert_eq!(check(&path).unwrap().verdict, Verdict::Pass);
    let checked = check(&data("hf_olmoe_bf16")).unwrap();
    assert!(checked.report().contains("1 tokens have more than one choice"), "{}", checked.report());
}

/// Experts 0 and 1 have the same logits; this run prefers expert 1 where an exact choice takes 0.
fn run_with_ties() -> (File, usize) {
    let drawn = Case::new("40,16,8,4,2".parse().unwrap()).problem::<f32>().unwrap();
    let mut w = drawn.router_w().unwrap().to_owned();
    let first = w.row(0).to_owned();
    w.row_mut(1).assign(&first);
    let router = Router::new(w.clone(), 2, Convention::SoftmaxOverTopK);
    let (w1, w2) = (drawn.w1().to_owned(), drawn.w2().to_owned());
    let (x, dout) = (drawn.x().to_owned(), drawn.dout().to_owned());
    let problem = Problem::new(x, w1, w2, None, Gating::Router(router), drawn.activation(), dout).unwrap();
    let logits = problem.x().dot(&w.t());
    let mut others = 0;
    let mut pairs = Vec::new();
    for (token, logits) in logits.outer_iter().enumerate() {
        let mut experts = [1, 0, 2, 3];
        experts.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        others += usize::from(experts[1] == 1 && experts[0] != 0);
        pairs.extend(experts[..2].iter().map(|&expert| (TokenId(token as u32), ExpertId(expert as u32))));
    }
    let outcome = run_with(&problem, &Routing::new(40, 4, pairs).unwrap()).unwrap();
    let path = save("ties", &[]);
    write(&path, &problem, &outcome.routing, &outcome.results, &Metadata::default()).unwrap();
    (File::read(&path), others)
}

#[test]
fn a_choice_that_equal_logits_leave_open_is_taken_from_the_results_and_said() {
    let (file, others) = run_with_ties();
    assert!(others > 5);
    let blind = file.clone().without("token_idx").without("expert_idx");
    for (name, file) in [("ids", file), ("logits", blind.clone()), ("blind", blind.clone().without("router_logits"))] {
        let checked = check(&file.save(&format!("ties_{name}"))).unwrap();
        assert_eq!(checked.verdict, Verdict::Pass, "{}", checked.report());
        let said = format!("{others} tokens are not sent to the exact top-K");
        assert!(checked.report().contains(&said), "{said}: {}", checked.report());
        // Without ids nobody knows which of two equals ds and scores name first.
        assert_eq!(checked.report().contains("not read: `ds`, `scores`"), name != "ids", "{}", checked.report());
    }
    // Even where o is wrong, dx shows who was chosen: the fault stays in o.
    let wrong = blind.without("y").edit("o", |values| values.fill(0.0)).save("ties_wrong");
    let faults = check(&wrong).unwrap().faults();
    assert!(!faults.is_empty() && faults.iter().all(|(output, _)| *output == Output::O), "{faults:?}");
}

#[test]
fn a_fused_file_that_needs_no_declaration_gets_the_same_model() {
    for (name, model) in [("sonic_rounding_a", REAL[1].1), ("hf_olmoe_bf16", REAL[3].1)] {
        let path = File::of_data(name).without_string("rounding_model").save(&format!("undeclared_{name}"));
        let checked = check(&path).unwrap();
        assert_eq!((checked.verdict, checked.model()), (Verdict::Pass, model));
    }
}

#[test]
fn the_counts_of_token_rounding_are_checked() {
    let report = check(&data("sonic_rounding_a")).unwrap().report();
    for held in [
        "expert_frequency is that of the routing",
        "topk_frequency is that of the top 2 of router_logits",
        "every expert's count is a multiple of 128, less than a tile from its top-K count",
        "the pairs are those that nearest_frequency_ties_down makes of the logits",
    ] {
        assert!(report.contains(held), "{held}: {report}");
    }
}
