//! Drafts, loaded and verified.
#![allow(clippy::result_large_err)] // An error ends the test.

use super::made::{data, ranks, tensor_parallel};
use super::verify::{Executed, listed, with_attrs};
use super::{map, try_load};
use weightd_checkpoint::{Checkpoint, Draft, LoadOptions, Rank, VerifyError, verify};
use weightd_core::plan::experts::ExpertPlacement;
use weightd_gpu::DeviceKind;

const DRAFTS: [(&str, Draft); 3] = [
    ("deepseek_v3_mtp", Draft::Mtp),
    ("eagle_llama", Draft::Eagle),
    ("eagle3_llama", Draft::Eagle),
];

#[test]
fn what_is_loaded_of_a_draft_verifies_as_that_draft_alone() {
    for (model, draft) in DRAFTS {
        let checkpoint = Checkpoint::open(&data(model)).unwrap();
        let target = tensor_parallel(2);
        let options = target.of_draft(draft);
        let loaded = try_load(&checkpoint, &options, &LoadOptions::of(DeviceKind::Cpu)).unwrap();
        for (placement, weights) in map(loaded) {
            verify(&checkpoint, &options, Rank::of(&placement), &weights).unwrap();
            if draft == Draft::Mtp {
                let error = verify(&checkpoint, &target, Rank::of(&placement), &weights).unwrap_err();
                assert!(matches!(error, VerifyError::Missing { .. }), "{error}");
            }
        }
    }
}

#[test]
fn experts_of_a_draft_are_spread_and_verify() {
    let checkpoint = Checkpoint::open(&data("deepseek_v3_mtp")).unwrap();
    for placement in [ExpertPlacement::Linear, ExpertPlacement::RoundRobin] {
        let mut options = tensor_parallel(2).of_draft(Draft::Mtp);
        options.experts = Some(placement);
        let loaded = try_load(&checkpoint, &options, &LoadOptions::of(DeviceKind::Cpu)).unwrap();
        let mut experts = Vec::new();
        for (placement, weights) in map(loaded) {
            verify(&checkpoint, &options, Rank::of(&placement), &weights).unwrap();
            experts.push(
                weights
                    .manifest()
                    .tensors()
                    .filter(|tensor| tensor.name.contains(".experts."))
                    .count(),
            );
        }
        assert_eq!(experts, [4 * 3, 4 * 3]);
    }
}

#[test]
fn other_attributes_than_the_drafts_do_not_verify() {
    for (model, draft) in DRAFTS {
        let checkpoint = Checkpoint::open(&data(model)).unwrap();
        let options = tensor_parallel(2).of_draft(draft);
        let rank = Executed::new(&checkpoint, &options, ranks(&options.parallel)[1].0);
        let tensors = listed(&rank.plan.manifest);
        let verify = |attrs: &[(&str, bool)]| {
            let manifest = with_attrs(&rank.plan.manifest.regions()[0], &tensors, attrs).unwrap();
            rank.verify_as(&checkpoint, &options, manifest)
        };
        let own: Vec<(&str, bool)> = rank.plan.manifest.attrs().collect();
        assert_eq!(own.len(), 2);
        verify(&own).unwrap();
        let negated = |at: usize| {
            let mut attrs = own.clone();
            attrs[at].1 = !attrs[at].1;
            attrs
        };
        let more = [&own[..], &[("has_own_norm", true)]].concat();
        for wrong in [negated(0), negated(1), own[..1].to_vec(), vec![], more] {
            let verified = verify(&wrong);
            assert!(
                matches!(verified, Err(VerifyError::Attributes)),
                "{model}, {wrong:?}: {verified:?}"
            );
        }
    }
}
