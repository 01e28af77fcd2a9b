//! Placements, printed.

use crate::harness::*;
use serde_json::Value;
use std::fs::File;

#[test]
fn plan_prints_the_expected_placements_and_rejections() {
    let vectors: Value = serde_json::from_str(include_str!("../../../core/tests/vectors/plan.json")).unwrap();
    let site = Site::new();
    for case in vectors["placement"].as_array().unwrap() {
        let mut args = vec!["plan".to_owned(), "--json".to_owned()];
        for (name, value) in case["config"].as_object().unwrap() {
            args.push(format!("--{}={value}", name.replace('_', "-")));
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        if let Some(expected) = case["error"].as_str() {
            let ran = site.run(&args);
            assert!(ran.error(2).contains(expected), "{ran:?}");
            assert_eq!(ran.stdout, "");
            continue;
        }
        let printed = site.json(&args);
        assert_eq!(printed.len(), 1);
        let placements = printed[0]["placements"].as_array().unwrap();
        let expected = case["placements"].as_array().unwrap();
        assert_eq!(placements.len(), expected.len());
        for (placement, expected) in placements.iter().zip(expected) {
            let keys: Vec<&String> = placement.as_object().unwrap().keys().collect();
            assert_eq!(
                keys,
                ["dp_rank", "global_rank", "local_rank", "pp_rank", "tp_rank"]
            );
            for (name, value) in expected.as_object().unwrap() {
                assert_eq!(&placement[name], value, "{name} in {case}");
            }
        }
    }
}

#[test]
fn contradicting_ports_are_refused() {
    let site = Site::new();
    let ports = ["plan", "--master-port", "7000", "--draft-master-port", "7000"];
    let error = site.run(&ports).error(2);
    assert!(error.contains("7000"), "{error}");
}

#[test]
fn a_full_stdout_is_an_error_and_no_panic() {
    let site = Site::new();
    let mut plan = site.weightd(&["plan"]);
    plan.stdout(File::options().write(true).open("/dev/full").unwrap());
    let error = finish(plan).error(1);
    assert!(error.contains("cannot write to stdout"), "{error}");
}
