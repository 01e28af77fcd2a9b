//! Quantized checkpoints, loaded and verified.

use super::made::methods::method;
use super::made::{Decoder, Made, SMALL, ranks, tensor_parallel};
use super::verify::Executed;
use super::{map, try_load};
use weightd_checkpoint::{FloatDtype, LoadOptions, Rank, ShardingOptions, VerifyError, verify};
use weightd_gpu::DeviceKind;

const DECODER: Decoder = Decoder {
    layers: 1,
    hidden: 64,
    heads: 4,
    kv_heads: 1,
    head_dim: 64,
    intermediate: 128,
    ..SMALL
};

const METHODS: [&str; 4] = [
    "gptq of 4 bits, groups of 32",
    "fp8 square blocks",
    "pack-quantized of 4 bits, groups of 16, symmetric: false",
    "nvfp4",
];

#[test]
fn what_is_loaded_of_a_quantized_checkpoint_verifies() {
    for name in METHODS {
        let (config, tensors) = method(name).quantize(&DECODER);
        let made = Made::new(&config, std::slice::from_ref(&tensors));
        let checkpoint = made.open();
        for dtype in [FloatDtype::Auto, FloatDtype::Float32] {
            for tp in [1, 2] {
                let options = ShardingOptions {
                    dtype,
                    ..tensor_parallel(tp)
                };
                let loaded = try_load(&checkpoint, &options, &LoadOptions::of(DeviceKind::Cpu)).unwrap();
                for (placement, weights) in map(loaded) {
                    let verified = verify(&checkpoint, &options, Rank::of(&placement), &weights).unwrap();
                    assert_eq!(verified.tensors, tensors.len(), "{name}");
                    let other = Rank {
                        tp: 1 - placement.tp_rank,
                        ..Rank::of(&placement)
                    };
                    if tp == 2 {
                        let error = verify(&checkpoint, &options, other, &weights).unwrap_err();
                        assert!(matches!(error, VerifyError::Differs { .. }), "{name}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_changed_byte_of_any_tensor_of_a_quantized_layer_is_found() {
    for name in METHODS {
        let (config, tensors) = method(name).quantize(&DECODER);
        let made = Made::new(&config, &[tensors]);
        let (checkpoint, options) = (made.open(), tensor_parallel(2));
        let rank = Executed::new(&checkpoint, &options, ranks(&options.parallel)[1].0);
        for tensor in rank
            .plan
            .manifest
            .tensors()
            .filter(|tensor| tensor.name.contains("_proj."))
        {
            let last = (tensor.offset + tensor.packed_bytes() - 1) as usize;
            let error = rank
                .with(last, |byte| byte ^ 1)
                .verify(&checkpoint, &options)
                .unwrap_err();
            assert!(
                matches!(&error, VerifyError::Differs { tensor: found, .. } if found == tensor.name),
                "{name}: {error}"
            );
        }
    }
}
