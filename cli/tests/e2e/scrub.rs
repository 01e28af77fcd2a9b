//! Proving what is resident.

use crate::checkpoints::*;
use crate::harness::*;
use crate::lost::{BYTES, published_by_us};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{Dtype, HandleKind};
use weightd_core::wire::message::{ContentInfo, Expects, Publish};
use weightd_gpu::Device;

#[test]
fn what_was_loaded_is_proved_without_the_checkpoint() {
    let site = Site::new();
    let copy = copy_of(&model("llamagptq"), &site.path().join("copy"));
    let _launcher = site.preload(&copy, 2, &["--checksums"]);
    let kind = " (dtype auto, quantization gptq, checksums), ";
    let text = site.run(&["status"]).stdout;
    assert_eq!(text.matches(kind).count(), 2, "{text}");
    assert_eq!(site.status()[0]["checksums"], true);
    let lines = site.json(&["scrub", "--json"]);
    assert_eq!(lines.len(), 2);
    for line in &lines {
        assert_eq!(line["intact"], true, "{line}");
        assert!(
            line["bytes"].as_u64().unwrap() > 0 && line["tensors"].as_u64().unwrap() > 10,
            "{line}"
        );
    }
    let ran = site.run(&["scrub", "--rank", "1"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(
        ran.stdout.starts_with("rank 1: ") && ran.stdout.contains("hold what was loaded"),
        "{ran:?}"
    );
    assert_eq!(ran.stdout.lines().count(), 1, "{ran:?}");
    let ran = site.attach(&copy, 2, &["--all", "--verify=checksums"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.stdout.matches(", verified ").count(), 2, "{ran:?}");
    let error = site.run(&["scrub", "--rank", "7"]).error(1);
    let expected = format!("no such daemon serves weights in {}:", site.dir().display());
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn without_checksums_it_says_how_to_get_them() {
    let site = Site::new();
    site.run(&["scrub"]).error(1);
    let _launcher = site.preload(&model("llama"), 1, &[]);
    let ran = site.run(&["scrub"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(
        ran.stdout.contains("`weightd preload --checksums` takes them"),
        "{ran:?}"
    );
    let error = site
        .attach(&model("llama"), 1, &["--all", "--verify=checksums"])
        .error(1);
    assert!(
        error.contains("`weightd preload --checksums` takes them"),
        "{error}"
    );
    // Nobody could load again what was published.
    assert!(
        error.contains("what engines publish has none") && !error.contains("stop"),
        "{error}"
    );
}

#[test]
fn weights_that_are_not_what_was_loaded_are_found_and_named() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let served = published_by_us(&site, &model, true, |channel, daemon, key| {
        let mut builder = ManifestBuilder::new();
        builder.region(Region {
            handle: HandleKind::Memfd,
            bytes: BYTES,
            device: Device::host(daemon).uuid(),
            legacy: None,
        });
        for (name, offset) in [("first", 0), ("second", 4096)] {
            let spec = TensorSpec {
                kind: TensorKind::Parameter,
                persistent: true,
                dtype: Dtype::U8,
                shape: &[9],
                strides: None,
                region: 0,
                offset,
            };
            builder.tensor(name, spec);
        }
        let manifest = builder.finish().unwrap();
        // CRC-64/NVME of "123456789": what daemon 1 holds in its second tensor is not that.
        let manifest = manifest.with_checksums(vec![0xae8b_1486_0a79_9888; 2]).unwrap();
        let mut bytes = vec![0; BYTES as usize];
        for offset in [0, 4096] {
            bytes[offset..offset + 9].copy_from_slice(b"123456789");
        }
        bytes[4100] ^= daemon as u8;
        let encoded = manifest.encode();
        let publication = Publish {
            daemon,
            generation: None,
            expects: Expects::Empty,
            key,
            content: ContentInfo::of(&manifest, encoded.len()),
        };
        let descriptors = [&encoded, &bytes].map(|bytes| weightd_gpu::sealed(bytes).unwrap());
        channel.machine_mut().publish(publication, descriptors.into());
    });
    let Some(_served) = served else { return };
    let ran = site.run(&["scrub", "--json"]);
    let error = ran.error(1);
    assert!(error.contains("1 of 2 daemons"), "{error}");
    let mut lines: Vec<serde_json::Value> = ran
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    lines.sort_by_key(|line| line["global_rank"].as_u64());
    assert_eq!(
        (&lines[0]["intact"], &lines[1]["intact"]),
        (&true.into(), &false.into()),
        "{lines:?}"
    );
    assert_eq!(lines[1]["damaged"], serde_json::json!(["second"]));
    let ran = site.run(&["scrub", "--rank", "1"]);
    assert!(
        ran.stdout
            .contains("1 of 2 tensors do not hold what was loaded, first \"second\""),
        "{ran:?}"
    );
}
