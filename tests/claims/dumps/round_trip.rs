//! What is written is read back bit by bit, and our own engines pass their own check.

use half::{bf16, f16};
use sonicmoe::case::Case;
use sonicmoe::case::table::edge_cases;
use sonicmoe::cli::check::{CheckArgs, check_file};
use sonicmoe::dump::{Dump, Metadata, Model, Overrides, Source, write};
use sonicmoe::oracle::Verdict;
use sonicmoe::reference::StandardMoe;
use sonicmoe::sonic::cpu::CpuEngine;
use sonicmoe::{Element, Engine, GateLayout, Record, run};

fn round_trip<S: Element>(engine: &dyn Engine<S>, case: &Case, layout: GateLayout, name: &str) -> Verdict {
    let problem = case.problem::<S>().unwrap();
    let outcome = run(engine, &problem, Record::Intermediates).unwrap();
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.safetensors"));
    let metadata = Metadata { layout: Some(layout), producer: Some("a \"test\"\n".into()), ..Metadata::default() };
    write(&path, &problem, &outcome.routing, &outcome.results, &metadata).unwrap();

    let dump = Dump::read(&path, &Overrides::default()).unwrap();
    let wide = problem.widen();
    assert_eq!((dump.problem.x(), dump.problem.w1(), dump.problem.w2()), (wide.x(), wide.w1(), wide.w2()));
    assert_eq!((dump.problem.b1(), dump.problem.b2()), (wide.b1(), wide.b2()));
    assert_eq!((dump.problem.router_w(), dump.problem.router_b()), (wide.router_w(), wide.router_b()));
    assert_eq!((dump.problem.dout(), dump.problem.activation()), (wide.dout(), wide.activation()));
    assert_eq!((&dump.missing, &dump.unused), (&vec![], &vec![]));
    assert_eq!(dump.storage, S::DTYPE);
    assert_eq!(dump.metadata.producer.as_deref(), Some("a \"test\"\n"));
    for (output, stored) in &outcome.results {
        if let Some(read) = dump.results.get(output) {
            assert_eq!(read, stored, "{output}");
        }
    }
    let chosen = dump.choose(&dump.numerics(Model::Fused)).unwrap();
    assert_eq!(chosen.routing, outcome.routing);
    assert!(matches!(chosen.source, Source::Given | Source::Ids));

    let checked = check_file(&path, &CheckArgs::default()).unwrap();
    assert_eq!(checked.model(), Model::Fused, "{}", checked.report());
    std::fs::remove_file(path).unwrap();
    assert!(checked.verdict != Verdict::NumericFailure, "{}", checked.report());
    checked.verdict
}

#[test]
fn every_edge_case_survives_a_file_in_every_layout() {
    for (row, edge) in edge_cases().into_iter().enumerate() {
        let layout = GateLayout::ALL[row % 3];
        round_trip::<bf16>(&CpuEngine::<f32>::new(), &edge.case, layout, &format!("edge_{row}"));
    }
}

#[test]
fn every_type_survives_a_file_and_both_paths_pass() {
    let case = Case::new("65,48,40,6,2".parse().unwrap()).with_biases();
    let layout = GateLayout::ConcatenatedUpFirst;
    let verdicts = [
        round_trip::<f64>(&CpuEngine::<f64>::new(), &case, layout, "type_f64"),
        round_trip::<f32>(&CpuEngine::<f32>::new(), &case, layout, "type_f32"),
        round_trip::<f16>(&CpuEngine::<f32>::new(), &case, layout, "type_f16"),
        round_trip::<f32>(&StandardMoe::<f32>::new(), &case, layout, "type_standard"),
    ];
    assert_eq!(verdicts, [Verdict::Pass; 4]);
}
