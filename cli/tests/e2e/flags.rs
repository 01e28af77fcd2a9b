//! The command line of `vllm preload`, given to weightd.

use crate::checkpoints::*;
use crate::harness::*;
use serde_json::json;
use std::fs;

/// Flags for an engine alone.
const ENGINES: [&str; 13] = [
    "--served-model-name",
    "llama",
    "my-llama",
    "--max_model_len",
    "8k",
    "--enforce-eager",
    "--gpu-memory-utilization=0.9",
    "-O3",
    "--kv-cache-dtype",
    "fp8",
    "--compilation-config.mode",
    "3",
    "--no-enable-prefix-caching",
];

#[test]
fn a_command_line_of_vllm_serves_and_attaches() {
    let (site, llama) = (Site::new(), model("llama"));
    let elsewhere = site.path().join("elsewhere");
    let dir = elsewhere.to_str().unwrap();
    let weights = [
        "-tp",
        "2",
        "--dtype",
        "half",
        "--master-port",
        "29501",
        "--weight-cache-master-port",
        "29600",
        "--weight_cache_socket_dir",
        dir,
    ];
    let line = |command: &'static str| [&[command, llama.to_str().unwrap()], &ENGINES[..], &weights].concat();
    let mut launcher = site.start(site.weightd(&line("preload")));
    let ready = launcher.ready();
    assert!(ready.ends_with(&format!("ranks 2 roles 1 dir {dir}")), "{ready}");
    let log = launcher.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    let list = "have no effect here: --served-model-name, --max-model-len, --enforce-eager, \
                --gpu-memory-utilization, --optimization-level, --kv-cache-dtype, --no-enable-prefix-caching, \
                --compilation-config";
    assert!(warnings[0].ends_with(list), "{log}");

    let ran = site.run(&[&line("attach")[..], &["--all", "--verify"]].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let with_float = site.run(&[
        "attach",
        llama.to_str().unwrap(),
        "-tp=2",
        "--socket-dir",
        dir,
        "--all",
    ]);
    assert!(
        with_float.error(1).contains(": dtype (asked for auto, served "),
        "{with_float:?}"
    );
}

#[test]
fn what_would_change_weights_is_refused_in_a_line_before_anything_starts() {
    let (site, llama) = (Site::new(), model("llama"));
    let llama = llama.to_str().unwrap();
    for (flags, named) in [
        (
            &["--load-format", "dummy"][..],
            "--load-format dummy is not supported",
        ),
        (&["--enable-eplb"], "--enable-eplb is not supported"),
        (
            &["-pcp", "2"],
            "--prefill-context-parallel-size 2 is not supported",
        ),
        (&["--config", "vllm.yaml"], "--config is not supported"),
        (&["--max-num-seqs"], "--max-num-seqs needs a value"),
        (
            &["-dp", "4", "-dpn", "1", "-dpl", "2"],
            "--data-parallel-rank 1 is one replica",
        ),
        (&["another"], "the model is named already"),
    ] {
        let error = site.run(&[&["preload", llama], flags].concat()).error(2);
        assert!(error.contains(named), "{error}");
    }
    for (flags, named) in [
        (["-q", "fp8"], "does not quantize while loading"),
        (
            ["--quantization-config", r#"{"linear": "fp8_per_tensor"}"#],
            "does not quantize while loading",
        ),
    ] {
        for command in ["preload", "plan"] {
            let error = site.run(&[&[command, llama], &flags[..]].concat()).error(1);
            assert!(error.contains(named), "{error}");
        }
    }
    let draft =
        json!({ "method": "eagle", "model": model("eagle_llama"), "quantization": "fp8" }).to_string();
    let error = site.run(&["preload", llama, "-sc", &draft]).error(1);
    assert!(
        error.contains("draft: ") && error.contains("does not quantize"),
        "{error}"
    );
    site.assert_clean();
}

#[test]
fn flags_of_nobody_are_refused() {
    let (site, llama) = (Site::new(), model("llama"));
    for strange in ["--max-model-length", "-tpx", "--port"] {
        let ran = site.run(&["preload", llama.to_str().unwrap(), strange, "2"]);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stderr.contains("unexpected argument"), "{ran:?}");
    }
    site.assert_clean();
}

#[test]
fn what_overrides_the_quantization_is_part_of_the_key() {
    let site = Site::new();
    let copy = copy_of(&model("qwen3"), &site.path().join("quantized"));
    let config = copy.join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["quantization_config"] = json!({ "quant_method": "fp8", "ignored_layers": ["re:.*"] });
    fs::write(&config, json.to_string()).unwrap();
    let over = [
        "-q",
        "fp8",
        "--quantization-config",
        r#"{"moe": {"activation": "fp8"}}"#,
    ];
    let _launcher = site.preload(&copy, 1, &over);
    let all = ["--all", "--verify"];
    let ran = site.attach(&copy, 1, &[&over[..], &all].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let without = site.attach(&copy, 1, &[&over[..2], &all].concat()).error(1);
    assert!(without.contains(": quant_config_hash (asked for "), "{without}");
    let other = site.attach(&copy, 1, &["-q", "awq", "--all"]).error(1);
    assert!(other.contains("quantization \"awq\""), "{other}");
}

#[test]
fn keys_of_the_speculative_configuration_are_one_configuration() {
    let (site, target) = (Site::new(), model("deepseek_v3_mtp"));
    let mut launcher = site.start(site.on_model(
        "preload",
        &target,
        1,
        &["--spec-method", "mtp", "--spec-tokens", "1"],
    ));
    assert!(launcher.ready().contains("ranks 1 roles 2"));
    let as_keys = ["-sc.method", "mtp", "--draft", "--all", "--verify"];
    let ran = site.attach(&target, 1, &as_keys);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}
