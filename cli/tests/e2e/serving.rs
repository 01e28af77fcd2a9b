//! Loading once and mapping often.

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use safetensors_file::Saved;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

mod safetensors_file {
    //! A safetensors file, read by hand.

    use serde_json::{Map, Value};
    use std::path::Path;

    pub struct Saved {
        pub header: Map<String, Value>,
        pub data: Vec<u8>,
    }

    impl Saved {
        pub fn read(path: &Path) -> Saved {
            let bytes = std::fs::read(path).unwrap();
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            let data = bytes[8 + length..].to_vec();
            Saved { header, data }
        }

        pub fn bytes(&self, name: &str) -> &[u8] {
            let offset = |at: usize| self.header[name]["data_offsets"][at].as_u64().unwrap() as usize;
            &self.data[offset(0)..offset(1)]
        }

        pub fn shape(&self, name: &str) -> Vec<u64> {
            serde_json::from_value(self.header[name]["shape"].clone()).unwrap()
        }
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";

fn serves(name: &str, tp: u32, tensors: u64, aliases: u64) {
    let (site, model) = (Site::new(), model(name));
    let mut launcher = site.start(site.on_model("preload", &model, tp, &[]));
    let expected = format!("READY node 0/1 ranks {tp} roles 1 dir {}", site.dir().display());
    assert_eq!(launcher.ready(), expected);

    let text = site.attach(&model, tp, &["--all", "--verify"]);
    assert_eq!(text.code, Some(0), "{text:?}");
    assert_eq!(text.stdout.lines().count(), tp as usize);
    for (rank, line) in text.stdout.lines().enumerate() {
        let start = format!("rank {rank}: {tensors} tensors, {aliases} aliases, ");
        assert!(line.starts_with(&start) && line.contains(", verified "), "{line}");
    }

    let save = site.path().join("saved");
    let more = ["--all", "--json", "--save", save.to_str().unwrap()];
    let ran = site.attach(&model, tp, &more);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let reports: Vec<Value> = ran
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let status = site.status();
    assert_eq!((reports.len(), status.len()), (tp as usize, tp as usize));
    for (rank, report) in reports.iter().enumerate() {
        let daemon = status
            .iter()
            .find(|status| status["global_rank"] == rank)
            .unwrap();
        for field in [
            "tensors",
            "aliases",
            "bytes",
            "generation",
            "device_uuid",
            "tp_rank",
        ] {
            assert_eq!(report[field], daemon[field], "{field}");
        }
        assert_eq!(
            (report["global_rank"].as_u64(), report["tp_rank"].as_u64()),
            (Some(rank as u64), Some(rank as u64))
        );
        assert_eq!(
            (report["tensors"].as_u64(), report["aliases"].as_u64()),
            (Some(tensors), Some(aliases))
        );
        assert_eq!(
            (&report["leased"], &report["verified"]),
            (&Value::Bool(true), &Value::Bool(false))
        );
        assert!(report["microseconds"].is_u64());
        assert_eq!(daemon["state"], "serving");
        assert_eq!(daemon["launcher_pid"], launcher.pid());
        let path = save.join(format!("dp0_pp0_tp{rank}.safetensors"));
        assert_eq!(report["saved"], path.to_str().unwrap());
    }
    saved_is_what_the_checkpoint_holds(&save, &model, tp);

    let last = (tp - 1).to_string();
    let one = site.attach(&model, tp, &["--rank", &last]);
    assert_eq!(one.code, Some(0), "{one:?}");
    assert!(one.stdout.starts_with(&format!("rank {last}: ")) && one.stdout.lines().count() == 1);
    let beyond = site.attach(&model, tp, &["--rank", &tp.to_string()]).error(2);
    assert!(
        beyond.contains(&format!("rank {tp} of the target is not on this node")),
        "{beyond}"
    );
}

/// The shards of the embedding, put together, are the embedding; a norm is whole on every rank.
fn saved_is_what_the_checkpoint_holds(save: &Path, model: &Path, tp: u32) {
    let files = fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == "safetensors")
    });
    let checkpoint: Vec<Saved> = files.map(|path| Saved::read(&path)).collect();
    let stored = |name: &str| {
        checkpoint
            .iter()
            .find(|file| file.header.contains_key(name))
            .unwrap()
    };
    let ranks: Vec<Saved> = (0..tp)
        .map(|rank| Saved::read(&save.join(format!("dp0_pp0_tp{rank}.safetensors"))))
        .collect();
    let norm = "model.norm.weight";
    let (mut embedding, mut rows) = (Vec::new(), 0);
    let names = tensor_names(model);
    for rank in &ranks {
        let saved: Vec<&String> = rank
            .header
            .keys()
            .filter(|name| *name != "__metadata__")
            .collect();
        assert_eq!(saved, names.iter().collect::<Vec<_>>());
        for name in &names {
            let (entry, whole) = (&rank.header[name], &stored(name).header[name]);
            assert_eq!(entry["dtype"], whole["dtype"], "{name}");
            let dims = |entry: &Value| entry["shape"].as_array().unwrap().len();
            assert_eq!(dims(entry), dims(whole), "{name}");
        }
        embedding.extend_from_slice(rank.bytes(EMBEDDING));
        rows += rank.shape(EMBEDDING)[0];
        assert_eq!(rank.bytes(norm), stored(norm).bytes(norm));
    }
    assert_eq!(embedding, stored(EMBEDDING).bytes(EMBEDDING));
    assert_eq!(rows, stored(EMBEDDING).shape(EMBEDDING)[0]);
}

#[test]
fn llama_is_served_to_one_two_and_four_ranks() {
    let tensors = tensor_names(&model("llama")).len() as u64;
    for tp in [1, 2, 4] {
        serves("llama", tp, tensors, 0);
    }
}

#[test]
fn qwen3_is_served_to_one_two_and_four_ranks_with_its_head_as_an_alias() {
    let tensors = tensor_names(&model("qwen3")).len() as u64;
    for tp in [1, 2, 4] {
        serves("qwen3", tp, tensors, 1);
    }
}

/// In ascending order.
fn tensor_names(model: &Path) -> BTreeSet<String> {
    let files = fs::read_dir(model).unwrap().map(|entry| entry.unwrap().path());
    files
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "safetensors")
        })
        .flat_map(|path| Saved::read(&path).header.into_iter().map(|(name, _)| name))
        .filter(|name| name != "__metadata__")
        .collect()
}

#[test]
fn a_tied_head_is_listed_as_an_alias_of_the_embedding_though_no_file_has_it() {
    let (site, model) = (Site::new(), model("qwen3"));
    assert!(!tensor_names(&model).contains("lm_head.weight"));
    let _launcher = site.preload(&model, 1, &[]);
    let save = site.path().join("saved");
    let ran = site.attach(&model, 1, &["--all", "--save", save.to_str().unwrap()]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let saved = Saved::read(&save.join("dp0_pp0_tp0.safetensors"));
    assert_eq!(saved.header["__metadata__"]["lm_head.weight"], EMBEDDING);
    assert!(!saved.header.contains_key("lm_head.weight"));
    let weights = map(&site, &model, 1).into_model();
    let address = |name: &str| weights.get(name).unwrap().contiguous().unwrap().as_ptr();
    assert_eq!(address("lm_head.weight"), address(EMBEDDING));
}

#[test]
fn a_checkpoints_directory_is_no_place_to_save_to() {
    let (site, model) = (Site::new(), model("qwen3"));
    let copy = copy_of(&model, &site.path().join("copy"));
    let _launcher = site.preload(&model, 1, &[]);
    let names = || {
        fs::read_dir(&copy)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect::<BTreeSet<_>>()
    };
    let before = names();
    let error = site
        .attach(&copy, 1, &["--all", "--save", copy.to_str().unwrap()])
        .error(2);
    assert!(
        error.contains("it holds a checkpoint (") && error.ends_with("name another directory"),
        "{error}"
    );
    assert_eq!(names(), before);
    // What was saved may be saved again.
    let save = site.path().join("saved");
    for _ in 0..2 {
        let ran = site.attach(&model, 1, &["--all", "--save", save.to_str().unwrap()]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
}

#[test]
fn however_often_engines_attach_nobody_reads_the_checkpoint_again() {
    let (site, model) = (Site::new(), model("llama"));
    let launcher = site.preload(&model, 2, &[]);
    let server = launcher.child("server");
    // What it read counts as the launcher's once it was waited for.
    launcher.has_loaded();
    let read = |pid: u32| {
        let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    let shard_bytes = site.status()[0]["bytes"].as_u64().unwrap();
    let before = read(launcher.pid()) + read(server);
    for _ in 0..5 {
        let mut engine = site.start(site.on_model("attach", &model, 2, &["--all", "--hold"]));
        for _ in 0..2 {
            assert!(engine.line().starts_with("rank "));
        }
        // Its own binary, its libraries, and the checkpoint's headers: no weights.
        assert!(
            read(engine.pid()) < shard_bytes / 4,
            "{} bytes",
            read(engine.pid())
        );
    }
    let after = read(launcher.pid()) + read(server);
    assert!(after - before < shard_bytes / 16, "{} bytes", after - before);
}

#[test]
fn a_node_of_several_serves_its_own_ranks() {
    let (site, model) = (Site::new(), model("llama"));
    let world = ["--data-parallel-size", "2", "--nnodes", "2", "--node-rank", "1"];
    let mut launcher = site.start(site.on_model("preload", &model, 2, &world));
    let ready = launcher.ready();
    assert!(
        ready.starts_with("READY node 1/2 ranks 2 roles 1 dir "),
        "{ready}"
    );
    let mut args = vec!["--all", "--verify", "--json"];
    args.extend(world);
    let ran = site.attach(&model, 2, &args);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let ranks: Vec<_> = ran
        .stdout
        .lines()
        .map(|line| {
            let report: Value = serde_json::from_str(line).unwrap();
            (
                report["global_rank"].as_u64(),
                report["dp_rank"].as_u64(),
                report["tp_rank"].as_u64(),
            )
        })
        .collect();
    assert_eq!(ranks, [(Some(2), Some(1), Some(0)), (Some(3), Some(1), Some(1))]);
}
