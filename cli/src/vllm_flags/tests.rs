use super::*;
use crate::args::Cli;
use clap::{CommandFactory, Parser};
use proptest::prelude::*;

fn line(text: &str) -> Vec<OsString> {
    let words = text.split_whitespace();
    std::iter::once("weightd")
        .chain(words)
        .map(OsString::from)
        .collect()
}

fn translated(text: &str) -> Result<Translated, String> {
    translate(line(text), &Cli::command()).map_err(|error| error.to_string())
}

/// A line means another one, without anything that is left out.
#[track_caller]
fn means(vllm: &str, ours: &str) {
    let translated = translated(vllm).unwrap();
    assert_eq!(translated.args, line(ours), "{vllm}");
    assert_eq!(translated.ignored, [""; 0], "{vllm}");
}

#[test]
fn every_spelling_of_a_flag_is_understood() {
    means("preload -tp 4 m", "preload --tensor-parallel-size=4 --model=m");
    means("preload m -tp=4", "preload --tensor-parallel-size=4 --model=m");
    means(
        "preload -pp 2 -dp 4 -dpl 2 -dpr 2 -dpa h -dpp 1 -ep",
        "preload --pipeline-parallel-size=2 --data-parallel-size=4 --data-parallel-size-local=2 \
         --data-parallel-start-rank=2 --data-parallel-address=h --data-parallel-rpc-port=1 \
         --enable-expert-parallel",
    );
    means(
        "plan -n 2 -r 1 -dpn 3 -q fp8",
        "plan --nnodes=2 --node-rank=1 --data-parallel-rank=3 --quantization=fp8",
    );
    means(
        "attach --tensor_parallel_size 2 --key_extra a_b=c_d",
        "attach --tensor-parallel-size=2 --key-extra=a_b=c_d"
            .replace("--key-extra=", "--key-extra ")
            .as_str(),
    );
    means("preload -n2 -t4 --tp 8", "preload -n2 -t4 --tp 8");
    means("preload -- m", "preload --model=m");
    means(
        "preload -ep --no-enable-expert-parallel -ep",
        "preload --enable-expert-parallel",
    );
    means("preload -ep --no-enable-expert-parallel", "preload");
}

#[test]
fn a_command_without_a_model_takes_parallel_sizes_and_refuses_what_says_which_weights_are_meant() {
    means(
        "serve -tp 4 --pipeline_parallel_size 2 --replace keep --draft",
        "serve --tensor-parallel-size=4 --pipeline-parallel-size=2 --replace keep --draft",
    );
    let ignored = translated("serve --enable-lora -dp 2").unwrap();
    assert_eq!(ignored.args, line("serve --data-parallel-size=2"));
    assert_eq!(ignored.ignored, ["--enable-lora"]);
    for refused in [
        "m",
        "--model m",
        "--dtype float16",
        "-q fp8",
        "-sc.method mtp",
        "--spec-method mtp",
    ] {
        let error = translated(&format!("serve {refused}")).unwrap_err();
        assert!(error.contains("is not for `weightd serve`"), "{refused}: {error}");
    }
}

#[test]
fn a_digest_is_of_the_model_that_the_other_commands_are_told_of() {
    means("digest -m m", "digest -m m");
    for given in ["m", "--model m", "-- m"] {
        means(&format!("digest {given}"), "digest --model=m");
    }
    means(
        "digest m --revision main --recompute",
        "digest --revision=main --recompute --model=m",
    );
    // How the bytes are spread does not concern them.
    let ignored = translated("digest m -tp 2 --dtype float16").unwrap();
    assert_eq!(ignored.args, line("digest --model=m"));
    assert_eq!(ignored.ignored, ["--tensor-parallel-size", "--dtype"]);
}

#[test]
fn a_value_that_had_to_be_tied_to_its_flag_is_no_model() {
    for given in [
        "m --verify checksums",
        "--verify checkpoint --all",
        "--model m --verify checksums",
    ] {
        let error = translated(&format!("attach {given}")).unwrap_err();
        assert!(
            error.contains("a value of --verify takes `=`, as in --verify=ch"),
            "{given}: {error}"
        );
    }
    let misspelt = translated("attach -m m --verify chksums").unwrap_err();
    assert!(misspelt.contains("\"chksums\""), "{misspelt}");
    assert!(
        misspelt.ends_with("a value of --verify takes `=`, as in --verify=VALUE"),
        "{misspelt}"
    );
    means("attach --verify m", "attach --verify --model=m");
    means(
        "attach --verify=checksums m",
        "attach --verify=checksums --model=m",
    );
    means(
        "attach --verify --model checksums",
        "attach --verify --model=checksums",
    );
    let extra = translated("attach m n").unwrap_err();
    assert!(
        extra.contains("\"n\": the model is named already, \"m\""),
        "{extra}"
    );
}

#[test]
fn keys_of_the_speculative_configuration_make_its_json() {
    for given in [
        "-sc.method mtp -sc.model m",
        "--speculative-config.method=mtp --speculative_config.model m",
        "--spec-method mtp --spec-model m",
        r#"--spec-method mtp -sc {"model":"m"}"#,
        r#"--speculative-config={"model":"m"} --spec_method mtp"#,
    ] {
        means(
            &format!("preload {given}"),
            r#"preload --speculative-config={"method":"mtp","model":"m"}"#,
        );
    }
    let error = translated(r#"preload --spec-method mtp -sc {"method":"eagle"}"#).unwrap_err();
    assert!(error.contains("\"method\" is given twice"), "{error}");
}

#[test]
fn what_is_no_matter_of_weights_is_left_out_and_told() {
    let translated = translated(
        "preload --served-model-name a b --max_model_len 8k -O3 --no-enable-prefix-caching -cc.mode 3 -tp 2 \
         --hf-token --load-format auto --stream-interval -1 --watermark=-0.5 --max-model-len 4k --model m",
    )
    .unwrap();
    assert_eq!(
        translated.args,
        line("preload --tensor-parallel-size=2 --model=m")
    );
    assert_eq!(
        translated.ignored,
        [
            "--served-model-name",
            "--max-model-len",
            "--optimization-level",
            "--no-enable-prefix-caching",
            "--hf-token",
            "--load-format",
            "--stream-interval",
            "--watermark",
            "--compilation-config",
        ]
    );
}

#[test]
fn a_flag_of_another_command_of_ours_is_no_matter_either() {
    let translated = translated("plan --weight-cache-health-port 8000 -n 2").unwrap();
    assert_eq!(translated.args, line("plan --nnodes=2"));
    assert_eq!(translated.ignored, ["--weight-cache-health-port"]);
}

#[test]
fn what_would_change_the_weights_is_refused() {
    for (given, named) in [
        ("--load-format dummy", "--load-format dummy"),
        ("--load-format=ipc_cache", "--load-format ipc_cache"),
        ("--enable-eplb", "--enable-eplb"),
        ("-dcp 2", "--decode-context-parallel-size 2"),
        ("-pcp=2", "--prefill-context-parallel-size 2"),
        ("--hf-overrides.num_hidden_layers 2", "--hf-overrides"),
        ("--cpu-offload-gb 4", "--cpu-offload-gb 4"),
        ("--model-impl transformers", "--model-impl"),
        ("--config vllm.yaml", "--config"),
    ] {
        let error = translated(&format!("preload m {given}")).unwrap_err();
        assert!(
            error.contains(named) && error.contains("is not supported: "),
            "{error}"
        );
    }
    for harmless in [
        "--load-format auto",
        "--no-enable-eplb",
        "-dcp 1",
        "--hf-overrides.rope_scaling.factor 4.0",
        "--hf-overrides {}",
        "--cpu-offload-gb 0",
    ] {
        let translated = translated(&format!("preload m {harmless}")).unwrap();
        assert_eq!(translated.args, line("preload --model=m"), "{harmless}");
        assert_eq!(translated.ignored.len(), 1, "{harmless}");
    }
}

#[test]
fn what_is_missing_or_too_much_is_said() {
    let error = |text: &str| translated(text).unwrap_err();
    assert!(error("preload --max-model-len").contains("--max-model-len needs a value"));
    assert!(error("preload --served-model-name -tp 2").contains("--served-model-name needs a value"));
    assert!(error("preload -sc.method").contains("--speculative-config needs a value"));
    assert!(error("preload a b").contains("\"b\": the model is named already"));
    assert!(error("preload a --model b").contains("\"a\": the model is named already"));
}

#[test]
fn strange_flags_and_other_commands_are_left_to_clap() {
    means("preload m --strange 3", "preload --strange m 3");
    means("preload m --help", "preload --help m");
    means("status --json -tp x", "status --json -tp x");
    means("--log debug status", "--log debug status");
    means("--log preload preload m", "--log preload preload --model=m");
    means("", "");
}

#[test]
fn every_flag_that_is_ours_by_the_table_is_ours() {
    let cli = Cli::command();
    let preload = Known::of(cli.find_subcommand("preload").unwrap());
    for flag in FLAGS {
        let ours = preload.0.contains_key(&format!("--{}", flag.name));
        assert_eq!(ours, matches!(flag.weights, Weights::Ours), "{}", flag.name);
    }
    for command in TRANSLATED {
        let known = Known::of(&cli).and(cli.find_subcommand(command).unwrap());
        for name in known.0.keys().filter_map(|name| name.strip_prefix("--")) {
            let flag = named(name);
            assert!(
                flag.is_none_or(|flag| matches!(flag.weights, Weights::Ours)),
                "{command} --{name}"
            );
        }
    }
}

#[test]
fn the_table_names_each_flag_once() {
    let mut names: Vec<_> = FLAGS.iter().map(|flag| flag.name).collect();
    names.sort_unstable();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
    assert!(SHORT.iter().all(|(_, long)| names.contains(long)));
}

#[test]
fn a_translated_line_is_parsed_like_one_of_ours() {
    let parse = |text: &str| format!("{:?}", Cli::parse_from(translated(text).unwrap().args));
    assert_eq!(
        parse("preload m -tp 2 -dp 4 -dpl 2 --dtype half --max-num-seqs 8 --weight_cache_socket_dir /run/w"),
        parse("preload --model m -t 2 -d 4 --data-parallel-size-local 2 --dtype float16 --socket-dir /run/w")
    );
}

fn word() -> impl Strategy<Value = String> {
    let flag = (0..FLAGS.len()).prop_map(|number| format!("--{}", FLAGS[number].name));
    let short = prop::sample::select(SHORT).prop_map(|(short, _)| format!("-{short}"));
    prop_oneof![
        3 => flag,
        3 => short,
        1 => "--no-(enable-expert-parallel|enable-eplb|strange)",
        1 => "--(speculative-config|hf-overrides|tp|key-extra|strange)([.][a-z]{0,2}[+]?){0,3}(=[a-z]{0,2})?",
        3 => "[a-z0-9{}\"=.+-]{0,4}",
    ]
}

proptest! {
    /// What clap is given holds nothing that has to be translated again.
    #[test]
    fn a_translated_line_is_its_own_translation(words in prop::collection::vec(word(), 0..8)) {
        let cli = Cli::command();
        let line = ["weightd", "preload"].map(str::to_owned).into_iter().chain(words);
        if let Ok(once) = translate(line.map(OsString::from), &cli) {
            let twice = translate(once.args.clone(), &cli).unwrap();
            prop_assert_eq!(twice.args, once.args);
            prop_assert_eq!(twice.ignored, [""; 0]);
        }
    }
}

#[test]
fn a_word_after_a_flag_that_takes_none_is_said_to_be_the_model() {
    for given in ["digest --recompute true m", "preload -ep true m"] {
        let error = translated(given).unwrap_err();
        assert!(
            error.starts_with("unexpected argument \"m\": the model is named already, \"true\""),
            "{given}: {error}"
        );
        assert!(error.ends_with("that flag takes none"), "{given}: {error}");
    }
    let error = translated("digest --model m --recompute true").unwrap_err();
    assert!(
        error.starts_with("unexpected argument \"true\": the model is named already; "),
        "{error}"
    );
    assert!(error.ends_with("that flag takes none"), "{error}");
}
