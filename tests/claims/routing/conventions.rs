//! Names of routers on command lines and in files.

use sonicmoe::Convention;
use sonicmoe::routing::GroupedSigmoid;

#[test]
fn every_convention_is_what_its_name_is_read_as() {
    let names = ["softmax_over_topk", "topk_over_softmax", "topk_over_softmax_renormalized"];
    assert_eq!(Convention::ALL.map(|convention| convention.to_string()), names);
    for (convention, name) in Convention::ALL.into_iter().zip(names) {
        assert_eq!(name.parse::<Convention>().unwrap(), convention);
        for wrong in [format!("{name}s"), name[1..].to_string(), String::new()] {
            let error = wrong.parse::<Convention>().unwrap_err().to_string();
            assert!(names.iter().chain(&["grouped_sigmoid"]).all(|name| error.contains(name)), "{error}");
        }
    }
}

#[test]
fn a_router_of_groups_is_read_as_it_prints_and_what_is_missing_or_unknown_is_said() {
    let router = GroupedSigmoid { groups: 8, kept: 4, renormalized: false, factor: 2.5 };
    let text = router.to_string();
    assert_eq!(text, "grouped_sigmoid:groups=8,kept=4,renormalized=false,factor=2.5");
    assert_eq!(text.parse::<Convention>().unwrap(), Convention::GroupedSigmoid(router));
    for (wrong, reason) in [
        ("grouped_sigmoid", "it has no constants"),
        ("grouped_sigmoid:groups=8,kept=4,renormalized=false", "a constant is missing"),
        ("grouped_sigmoid:groups=8,kept,renormalized=false,factor=1", "a constant has no value"),
        ("grouped_sigmoid:groups=8,kept=x,renormalized=false,factor=1", "its value no number"),
        ("grouped_sigmoid:groups=8,kept=4,renormalized=false,factor=1,more=1", "a constant is unknown"),
    ] {
        let error = wrong.parse::<Convention>().unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("groups=4,kept=2"), "{wrong}: {error}");
        assert!(error.contains(&format!("`{wrong}`")), "{error}");
    }
}
