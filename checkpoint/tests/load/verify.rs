//! Verification passes for what was loaded, and finds everything that differs from it.
#![allow(clippy::result_large_err)] // An error ends the test.

use super::made::execute::{elements, regions};
use super::made::generated::{Case, Family, Sizes, cases};
use super::made::{Decoder, Made, SMALL, Tensor, ranks, tensor_parallel, world};
use super::{map, mapped, try_load};
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeSet;
use weightd_checkpoint::{
    Checkpoint, FloatDtype, Layout, LoadOptions, NodePlan, Rank, RankPlan, Sharding, ShardingOptions,
    VerifyError, verify,
};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{Dtype, HandleKind, Manifest};
use weightd_core::plan::placement::Placement;
use weightd_gpu::{Device, DeviceKind, Mapping, Weights};

fn dtypes() -> impl Strategy<Value = FloatDtype> {
    prop::sample::select(vec![FloatDtype::Auto, FloatDtype::Float16, FloatDtype::Float32])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whatever_is_loaded_verifies(mut case in cases(), dtype in dtypes()) {
        case.options.dtype = dtype;
        let made = case.make();
        let checkpoint = made.open();
        let loaded = try_load(&checkpoint, &case.options, &LoadOptions::of(DeviceKind::Cpu)).unwrap();
        for (placement, weights) in map(loaded) {
            let verified = verify(&checkpoint, &case.options, Rank::of(&placement), &weights).unwrap();
            let listed = (weights.manifest().tensors().len(), weights.manifest().aliases().len());
            prop_assert_eq!((verified.tensors, verified.aliases), listed);
        }
    }

    #[test]
    fn a_flipped_bit_is_found_wherever_it_is(
        mut case in cases(), dtype in dtypes(), choice in any::<[prop::sample::Index; 3]>(), bit in 0u8..8,
    ) {
        case.options.dtype = dtype;
        let made = case.make();
        let checkpoint = made.open();
        let all = ranks(&case.options.parallel);
        let rank = Executed::new(&checkpoint, &case.options, all[choice[0].index(all.len())].0);
        rank.verify(&checkpoint, &case.options).unwrap();
        let owned = owned(&rank.plan.manifest);
        // Any byte, which in a small model often is between tensors, and one of a tensor.
        let tensors: Vec<_> = rank.plan.manifest.tensors().filter(|tensor| tensor.elements() > 0).collect();
        let tensor = tensors[choice[1].index(tensors.len())];
        let element = choice[2].index(tensor.elements() as usize);
        let of_tensor = elements(&tensor).nth(element).unwrap();
        for at in [choice[2].index(rank.region.len()), of_tensor] {
            let flipped = rank.with(at, |byte| byte ^ (1 << bit)).verify(&checkpoint, &case.options);
            prop_assert_eq!(flipped.is_err(), owned.contains(&at), "byte {}, in {}", at, tensor.name);
        }
    }
}

/// A rank that is loaded in plain memory, to be altered.
pub struct Executed {
    pub plan: RankPlan,
    pub region: Vec<u8>,
}

impl Executed {
    pub fn new(checkpoint: &Checkpoint, options: &ShardingOptions, placement: Placement) -> Executed {
        let here = [(placement, Device::host(0).uuid())];
        let plan = NodePlan::new(
            &Sharding::new(checkpoint, options).unwrap(),
            &here,
            HandleKind::Memfd,
        )
        .unwrap();
        let region = regions(checkpoint, &plan).remove(0);
        Executed {
            plan: plan.ranks()[0].clone(),
            region,
        }
    }

    pub fn with(&self, at: usize, change: impl Fn(u8) -> u8) -> Executed {
        let mut region = self.region.clone();
        region[at] = change(region[at]);
        Executed {
            plan: self.plan.clone(),
            region,
        }
    }

    pub fn verify(&self, checkpoint: &Checkpoint, options: &ShardingOptions) -> Result<(), VerifyError> {
        self.verify_as(checkpoint, options, self.plan.manifest.clone())
    }

    /// As if it was published with another manifest.
    pub fn verify_as(
        &self,
        checkpoint: &Checkpoint,
        options: &ShardingOptions,
        manifest: Manifest,
    ) -> Result<(), VerifyError> {
        let region = Device::host(0).allocate(self.region.len() as u64).unwrap();
        region.write(0, &self.region).unwrap();
        let device = region.device();
        let export = region.export().unwrap();
        let mapping = Mapping::import(export.handle, export.fd, export.bytes, device).unwrap();
        let weights = Weights::new(manifest, vec![mapping]).unwrap();
        verify(checkpoint, options, Rank::of(&self.plan.placement), &weights).map(|_| ())
    }
}

/// Every byte that belongs to a tensor.
fn owned(manifest: &Manifest) -> BTreeSet<usize> {
    let bytes = |tensor: weightd_core::content::manifest::Tensor<'_>| {
        let width = (tensor.dtype.bits() / 8) as usize;
        elements(&tensor)
            .flat_map(|at| at..at + width)
            .collect::<Vec<_>>()
    };
    manifest.tensors().flat_map(bytes).collect()
}

fn case(family: Family, options: ShardingOptions) -> Case {
    let sizes = Sizes {
        layers: 2,
        hidden: 6,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        intermediate: 8,
        experts: 4,
        vocabulary: 100,
    };
    Case {
        family,
        sizes,
        options,
    }
}

fn vllm(tp: u32) -> ShardingOptions {
    ShardingOptions {
        layout: Layout::Vllm,
        ..tensor_parallel(tp)
    }
}

/// The second rank of two.
fn second(case: &Case) -> (Made, Executed) {
    let made = case.make();
    let rank = Executed::new(&made.open(), &case.options, ranks(&case.options.parallel)[1].0);
    (made, rank)
}

#[test]
fn a_swapped_view_that_is_no_other_counts_as_an_alias() {
    let mut case = case(Family::GptOss, vllm(1));
    (case.sizes.hidden, case.sizes.intermediate) = (1, 1);
    let made = case.make();
    let loaded = try_load(&made.open(), &case.options, &LoadOptions::of(DeviceKind::Cpu)).unwrap();
    let (placement, weights) = map(loaded).remove(0);
    let manifest = weights.manifest();
    let swapped = "model.layers.0.mlp.experts.routed_experts.w2_weight";
    assert!(manifest.aliases().any(|(alias, _)| alias == swapped));
    let verified = verify(&made.open(), &case.options, Rank::of(&placement), &weights).unwrap();
    let listed = (manifest.tensors().len(), manifest.aliases().len());
    assert_eq!((verified.tensors, verified.aliases), listed);
}

#[test]
fn a_difference_is_named_by_tensor_source_and_place() {
    let case = case(
        Family::DeepseekV3,
        ShardingOptions {
            dtype: FloatDtype::Float32,
            ..vllm(2)
        },
    );
    let (made, rank) = second(&case);
    let differs = |name: &str, element: usize| {
        let tensor = rank.plan.manifest.get(name).unwrap();
        let at = elements(&tensor).nth(element).unwrap() + 3;
        rank.with(at, |byte| byte ^ 0x80)
            .verify(&made.open(), &case.options)
            .unwrap_err()
    };
    // Rank 1 has rows 4..8 of each projection: up's second row is the sixth of the expert's.
    let fused = "model.layers.1.mlp.experts.routed_experts.w13_weight";
    match differs(fused, (3 * 8 + 5) * 6 + 1) {
        VerifyError::Differs {
            tensor,
            of,
            at,
            mapped,
            stored,
            ..
        } => {
            assert_eq!(
                (tensor.as_str(), of.as_str()),
                (fused, "model.layers.1.mlp.experts.3.up_proj.weight")
            );
            assert_eq!((at, mapped ^ stored), ((6 + 1) * 4 + 3, 0x80));
        }
        other => panic!("{other}"),
    }
    // 100 rows of 128: rank 1 has 36 of its 64.
    match differs("lm_head.weight", 40 * 6) {
        VerifyError::NotZero { tensor, at, mapped } => {
            assert_eq!(
                (tensor.as_str(), at, mapped),
                ("lm_head.weight", 4 * 6 * 4 + 3, 0x80)
            );
        }
        other => panic!("{other}"),
    }
    let error = differs("model.layers.1.mlp.gate.e_score_correction_bias", 0);
    assert!(matches!(error, VerifyError::Differs { at: 3, .. }), "{error}");
}

/// A tensor of a manifest, to be changed.
#[derive(Clone, Debug)]
pub struct Listed {
    name: String,
    kind: TensorKind,
    dtype: Dtype,
    shape: Vec<u64>,
    strides: Vec<u64>,
    offset: u64,
}

pub fn listed(manifest: &Manifest) -> Vec<Listed> {
    let listed = |(name, tensor): (&str, weightd_core::content::manifest::Tensor<'_>)| Listed {
        name: name.to_owned(),
        kind: tensor.kind,
        dtype: tensor.dtype,
        shape: tensor.shape.to_vec(),
        strides: tensor.strides.to_vec(),
        offset: tensor.offset,
    };
    let tensors = manifest.tensors().map(|tensor| (tensor.name, tensor));
    tensors.chain(manifest.aliases()).map(listed).collect()
}

fn manifest(region: &Region, tensors: &[Listed]) -> Option<Manifest> {
    with_attrs(region, tensors, &[])
}

pub fn with_attrs(region: &Region, tensors: &[Listed], attrs: &[(&str, bool)]) -> Option<Manifest> {
    let mut builder = ManifestBuilder::new();
    attrs.iter().for_each(|&(name, value)| builder.attr(name, value));
    let region = builder.region(*region);
    for tensor in tensors {
        let spec = TensorSpec {
            kind: tensor.kind,
            persistent: true,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            strides: Some(&tensor.strides),
            region,
            offset: tensor.offset,
        };
        builder.tensor(&tensor.name, spec);
    }
    // None where a view would leave the region.
    builder.finish().ok()
}

#[test]
fn every_name_has_to_be_there_and_no_other() {
    for family in [Family::Llama, Family::DeepseekV3, Family::GptOss] {
        let case = case(family, vllm(2));
        let (made, rank) = second(&case);
        let (checkpoint, region) = (made.open(), &rank.plan.manifest.regions()[0]);
        let all = listed(&rank.plan.manifest);
        let verify = |tensors: &[Listed]| {
            rank.verify_as(&checkpoint, &case.options, manifest(region, tensors).unwrap())
        };
        verify(&all).unwrap();
        for gone in 0..all.len() {
            let mut tensors = all.clone();
            let name = tensors.remove(gone).name;
            match verify(&tensors) {
                Err(VerifyError::Missing { names }) => assert_eq!(names, [name]),
                other => panic!("{name}: {other:?}"),
            }
        }
        let mut more = all.clone();
        more.push(Listed {
            name: "model.more.weight".into(),
            shape: vec![1],
            strides: vec![1],
            ..all[0].clone()
        });
        let error = verify(&more).unwrap_err();
        assert!(
            matches!(&error, VerifyError::Unexpected { names } if names == &["model.more.weight"]),
            "{error}"
        );
    }
}

fn row_major(shape: &[u64]) -> Vec<u64> {
    (0..shape.len())
        .map(|dim| shape[dim + 1..].iter().product())
        .collect()
}

#[test]
fn a_view_that_is_not_the_part_by_its_name_is_found() {
    for family in [Family::Llama, Family::DeepseekV3, Family::GptOss] {
        let case = case(family, vllm(2));
        let (made, rank) = second(&case);
        let (checkpoint, region) = (made.open(), &rank.plan.manifest.regions()[0]);
        let all = listed(&rank.plan.manifest);
        let unchanged = manifest(region, &all);
        let mut changed_views = 0;
        let mut assert_found = |number: usize, change: &dyn Fn(&mut Listed)| {
            let mut tensors = all.clone();
            change(&mut tensors[number]);
            // An equal view is an alias, which has no kind of its own.
            let changed = manifest(region, &tensors).filter(|changed| Some(changed) != unchanged.as_ref());
            let Some(manifest) = changed else { return };
            let name = &all[number].name;
            match rank.verify_as(&checkpoint, &case.options, manifest) {
                Err(VerifyError::NotAPart { part, .. }) => {
                    assert_eq!(part, *name);
                    changed_views += 1;
                }
                Err(VerifyError::Differs { .. } | VerifyError::NotZero { .. } | VerifyError::Kind { .. }) => {
                }
                // A whole tensor that moved takes its parts' places with it.
                Err(VerifyError::Dtype { tensor, .. } | VerifyError::Shape { tensor, .. }) => {
                    assert_eq!(tensor, *name)
                }
                other => panic!("{name}: {other:?}"),
            }
        };
        for (number, original) in all.iter().enumerate() {
            let width = original.dtype.bits() / 8;
            assert_found(number, &|tensor| tensor.offset += width);
            assert_found(number, &|tensor| tensor.dtype = Dtype::I16);
            assert_found(number, &|tensor| tensor.kind = TensorKind::Buffer);
            assert_found(number, &|tensor| tensor.strides = row_major(&tensor.shape));
            if let [.., outer, inner] = *original.shape
                && outer != inner
            {
                assert_found(number, &|tensor| {
                    let dims = tensor.shape.len();
                    tensor.shape.swap(dims - 1, dims - 2);
                    tensor.strides.swap(dims - 1, dims - 2);
                });
            }
        }
        assert!(changed_views > 10, "{changed_views}");
    }
}

#[test]
fn a_tied_head_has_to_be_the_embedding_as_it_is() {
    let mut config = SMALL.config();
    config["tie_word_embeddings"] = json!(true);
    let mut tensors = SMALL.tensors();
    tensors.retain(|(name, ..)| name != "lm_head.weight");
    let made = Made::new(&config, &[tensors]);
    let (checkpoint, options) = (made.open(), tensor_parallel(2));
    let rank = Executed::new(&checkpoint, &options, ranks(&options.parallel)[1].0);
    let mut all = listed(&rank.plan.manifest);
    all.retain(|tensor| tensor.name != "lm_head.weight");
    let embedding = all
        .iter()
        .find(|tensor| tensor.name == "model.embed_tokens.weight")
        .unwrap();
    let verify = |change: &dyn Fn(&mut Listed)| {
        let mut head = Listed {
            name: "lm_head.weight".into(),
            ..embedding.clone()
        };
        change(&mut head);
        let mut tensors = all.clone();
        tensors.push(head);
        rank.verify_as(
            &checkpoint,
            &options,
            manifest(&rank.plan.manifest.regions()[0], &tensors).unwrap(),
        )
    };
    verify(&|_| ()).unwrap();
    let missing = rank.verify_as(
        &checkpoint,
        &options,
        manifest(&rank.plan.manifest.regions()[0], &all).unwrap(),
    );
    assert!(matches!(missing, Err(VerifyError::Missing { names }) if names == ["lm_head.weight"]));
    for change in [
        &(|head: &mut Listed| head.offset += 2) as &dyn Fn(&mut Listed),
        &|head| head.dtype = Dtype::F16,
        &|head| head.shape[0] -= 1,
        &|head| head.strides = vec![1, 15],
    ] {
        let verified = verify(change);
        assert!(
            matches!(verified, Err(VerifyError::NotAliased { .. })),
            "{verified:?}"
        );
    }
}

/// Loads `loaded` as it would be served, and compares it with `checkpoint`.
fn compare(loaded: &Made, checkpoint: &Made) -> Result<(), VerifyError> {
    for (placement, weights) in mapped(&loaded.open(), 2) {
        verify(
            &checkpoint.open(),
            &tensor_parallel(2),
            Rank::of(&placement),
            &weights,
        )?;
    }
    Ok(())
}

#[test]
fn another_checkpoint_does_not_verify() {
    let good = SMALL.make();
    assert!(compare(&good, &SMALL.make()).is_ok());

    let altered = SMALL.make();
    let (path, last) = {
        let checkpoint = altered.open();
        let tensor = &checkpoint.tensors()["model.layers.1.mlp.down_proj.weight"];
        (
            checkpoint.files()[tensor.file].path.clone(),
            tensor.offset + tensor.bytes - 1,
        )
    };
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[last as usize] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    match compare(&altered, &good).unwrap_err() {
        VerifyError::Differs {
            tensor,
            at,
            mapped,
            stored,
            ..
        } => {
            assert_eq!(tensor, "model.layers.1.mlp.down_proj.weight");
            assert_eq!(
                (at, mapped ^ stored),
                (24 * 20 * 2 - 1, 1),
                "the last byte of rank 1's half"
            );
        }
        other => panic!("{other}"),
    }

    let with = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = SMALL.tensors();
        change(&mut tensors);
        Made::new(&SMALL.config(), &[tensors])
    };
    let more = with(&|tensors| {
        tensors.push((
            "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
            "F32",
            vec![4],
        ));
    });
    assert!(matches!(compare(&good, &more), Err(VerifyError::Missing { names }) if names.len() == 1));
    assert!(matches!(compare(&more, &good), Err(VerifyError::Unexpected { names }) if names.len() == 1));
    let typed = with(&|tensors| tensors[3].1 = "F16");
    assert!(matches!(
        compare(&typed, &good),
        Err(VerifyError::Dtype {
            mapped: Dtype::F16,
            expected: Dtype::BF16,
            ..
        })
    ));
    let narrow = Decoder {
        intermediate: 38,
        ..SMALL
    }
    .make();
    assert!(matches!(compare(&narrow, &good), Err(VerifyError::Shape { .. })));
}

#[test]
fn the_weights_of_another_rank_or_world_do_not_verify() {
    let made = Decoder { layers: 4, ..SMALL }.make();
    let checkpoint = made.open();
    let options = world(2, 2, 1);
    let at = |dp, pp, tp| Rank { dp, pp, tp };
    let loaded = try_load(&checkpoint, &options, &LoadOptions::of(DeviceKind::Cpu)).unwrap();
    for (placement, weights) in map(loaded) {
        let own = Rank::of(&placement);
        for rank in [at(0, 0, 0), at(0, 0, 1), at(0, 1, 0), at(0, 1, 1)] {
            let verified = verify(&checkpoint, &options, rank, &weights);
            assert_eq!(verified.is_ok(), rank == own, "{own:?} as {rank:?}");
        }
        let other = ShardingOptions {
            dtype: FloatDtype::Float32,
            ..options.clone()
        };
        assert!(matches!(
            verify(&checkpoint, &other, own, &weights),
            Err(VerifyError::Dtype { .. })
        ));
        let other = ShardingOptions {
            layout: Layout::Vllm,
            ..options.clone()
        };
        assert!(verify(&checkpoint, &other, own, &weights).is_err());
    }
}
