//! The flags of `vllm preload` (0.32.0), and what each of them does to weights. `vllm_flags.py`, beside
//! Cargo.toml, compares this table with an installed vLLM.

use super::harmless::{is_empty_object, is_zero, never, only_rotary};
use Takes::{AtMostOne, Many, Nothing, One, Switch};

/// One flag of vLLM.
#[derive(Debug)]
pub struct Flag {
    /// Without `--`.
    pub name: &'static str,
    pub takes: Takes,
    pub weights: Weights,
}

/// The values that come with a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    /// None; `--no-NAME` says the opposite.
    Switch,
    One,
    AtMostOne,
    /// One or more.
    Many,
}

/// What a flag is to whoever holds weights.
#[derive(Debug)]
pub enum Weights {
    /// Nothing: it is accepted, and so said.
    Free,
    /// A flag here too, by that name.
    Ours,
    /// This key of `--speculative-config`.
    Speculative(&'static str),
    /// More than can be served. Values for which `harmless` is true change nothing.
    Refused {
        harmless: fn(&str) -> bool,
        why: &'static str,
    },
}

const fn free(name: &'static str, takes: Takes) -> Flag {
    Flag {
        name,
        takes,
        weights: Weights::Free,
    }
}

const fn ours(name: &'static str, takes: Takes) -> Flag {
    Flag {
        name,
        takes,
        weights: Weights::Ours,
    }
}

const fn spec(name: &'static str, takes: Takes, key: &'static str) -> Flag {
    Flag {
        name,
        takes,
        weights: Weights::Speculative(key),
    }
}

const fn refused(name: &'static str, takes: Takes, harmless: fn(&str) -> bool, why: &'static str) -> Flag {
    Flag {
        name,
        takes,
        weights: Weights::Refused { harmless, why },
    }
}

/// Short forms, without `-`, and the names that they stand for.
pub const SHORT: &[(&str, &str)] = &[
    ("q", "quantization"),
    ("pp", "pipeline-parallel-size"),
    ("n", "nnodes"),
    ("r", "node-rank"),
    ("tp", "tensor-parallel-size"),
    ("dcp", "decode-context-parallel-size"),
    ("pcp", "prefill-context-parallel-size"),
    ("dp", "data-parallel-size"),
    ("dpn", "data-parallel-rank"),
    ("dpr", "data-parallel-start-rank"),
    ("dpl", "data-parallel-size-local"),
    ("dpa", "data-parallel-address"),
    ("dpp", "data-parallel-rpc-port"),
    ("dpb", "data-parallel-backend"),
    ("dph", "data-parallel-hybrid-lb"),
    ("dpe", "data-parallel-external-lb"),
    ("dpm", "data-parallel-multi-port-external-lb"),
    ("ep", "enable-expert-parallel"),
    ("sc", "speculative-config"),
    ("dc", "diffusion-config"),
    ("cc", "compilation-config"),
    ("ac", "attention-config"),
];

/// Every flag, grouped by what it does to weights.
pub const FLAGS: &[Flag] = &[
    // Flags of ours by the same name.
    ours("model", One),
    ours("dtype", One),
    ours("revision", One),
    ours("download-dir", One),
    ours("quantization", One),
    ours("quantization-config", One),
    ours("tensor-parallel-size", One),
    ours("pipeline-parallel-size", One),
    ours("data-parallel-size", One),
    ours("data-parallel-size-local", One),
    ours("data-parallel-start-rank", One),
    ours("data-parallel-rank", One),
    ours("data-parallel-address", One),
    ours("data-parallel-rpc-port", One),
    ours("nnodes", One),
    ours("node-rank", One),
    ours("master-addr", One),
    ours("master-port", One),
    ours("enable-expert-parallel", Switch),
    ours("expert-placement-strategy", One),
    ours("speculative-config", One),
    ours("weight-cache-socket-dir", One),
    ours("weight-cache-master-port", One),
    ours("weight-cache-draft-master-port", One),
    ours("weight-cache-health-port", One),
    ours("weight-cache-health-host", One),
    // Short for keys of --speculative-config.
    spec("spec-method", One, "method"),
    spec("spec-model", One, "model"),
    spec("spec-tokens", One, "num_speculative_tokens"),
    // What would have an engine hold other weights than these, or hold them elsewhere.
    // Those listed read safetensors files to the same end.
    refused(
        "load-format",
        One,
        |v| {
            [
                "auto",
                "hf",
                "safetensors",
                "fastsafetensors",
                "instanttensor",
                "runai_streamer",
            ]
            .contains(&v)
        },
        "weightd loads safetensors files, in its own way: leave the flag out",
    ),
    // Only the torchao strategy makes other tensors of them.
    refused(
        "safetensors-load-strategy",
        One,
        |v| ["lazy", "eager", "prefetch"].contains(&v),
        "weightd does not unflatten the tensors that torchao saves",
    ),
    // A configuration other than the checkpoint's own decides names, shapes and quantization. What rotary
    // embeddings are told is not stored as weights.
    refused(
        "hf-overrides",
        One,
        only_rotary,
        "weightd reads config.json as it is: put the change into a copy of the checkpoint's config.json",
    ),
    refused(
        "hf-config-path",
        One,
        never,
        "weightd reads the config.json beside the weights: put that one there",
    ),
    // Mistral's own format names its tensors otherwise.
    refused(
        "config-format",
        One,
        |v| ["auto", "hf"].contains(&v),
        "weightd reads checkpoints in the format of Hugging Face transformers",
    ),
    // Other classes may name, fuse and split weights in their own way.
    refused(
        "model-class-overrides",
        One,
        is_empty_object,
        "weightd holds weights for the class that config.json names",
    ),
    refused(
        "model-impl",
        One,
        |v| ["auto", "vllm"].contains(&v),
        "weightd holds weights for vLLM's own model classes",
    ),
    // Ranks are on devices by number, so that each engine finds its own.
    refused(
        "device-ids",
        One,
        never,
        "set CUDA_VISIBLE_DEVICES to these devices, for weightd and for the engine",
    ),
    // A further dimension of ranks, which share experts.
    refused(
        "prefill-context-parallel-size",
        One,
        |v| v == "1",
        "weightd places data, pipeline and tensor parallel ranks",
    ),
    // MLA models with this hold the query projection whole where --dcp-q-replicate says so, which some
    // turn on by themselves.
    refused(
        "decode-context-parallel-size",
        One,
        |v| v == "1",
        "ranks of a decode context may hold the whole query projection, which weightd splits",
    ),
    // Moves experts between ranks while serving, into memory that is mapped read-only.
    refused(
        "enable-eplb",
        Switch,
        never,
        "expert load balancing moves weights between ranks, and mapped weights stay as they are",
    ),
    refused(
        "enable-elastic-ep",
        Switch,
        never,
        "elastic expert parallelism moves weights between ranks, and mapped weights stay as they are",
    ),
    refused(
        "engram-config",
        One,
        never,
        "weightd does not hold n-gram embeddings",
    ),
    // With `data`, each rank holds all of a vision encoder.
    refused(
        "mm-encoder-tp-mode",
        One,
        |v| v == "weights",
        "weightd splits what it holds over the tensor parallel ranks",
    ),
    // Weights that an engine holds in host memory are its own.
    refused(
        "cpu-offload-gb",
        One,
        is_zero,
        "weightd holds all weights on the device",
    ),
    refused(
        "offload-group-size",
        One,
        is_zero,
        "weightd holds all weights on the device",
    ),
    // Which tokens there are, and what is made of text and of requests.
    free("tokenizer", One),
    free("tokenizer-mode", One),
    free("seed", One),
    free("allowed-local-media-path", One),
    free("allowed-media-domains", Many),
    free("tokenizer-revision", One),
    free("max-model-len", One),
    free("enable-return-routed-experts", Switch),
    free("return-sampling-mask", Switch),
    free("max-logprobs", One),
    free("logprobs-mode", One),
    free("use-fp64-gumbel", Switch),
    free("enable-trace-replay", Switch),
    free("skip-tokenizer-init", Switch),
    free("enable-prompt-embeds", Switch),
    free("served-model-name", Many),
    free("generation-config", One),
    free("override-generation-config", One),
    free("logits-processors", Many),
    free("io-processor-plugin", One),
    free("renderer-num-workers", One),
    free("reasoning-parser", One),
    free("reasoning-parser-plugin", One),
    free("stream-interval", One),
    free("watermark-config", One),
    free("diffusion-config", One),
    free("reasoning-config", One),
    free("structured-outputs-config", One),
    free("aux-output-config", One),
    // An engine for pooling leaves the head out or makes its own: it finds what it needs in what is held,
    // and fails by name where it does not.
    free("runner", One),
    free("convert", One),
    free("pooler-config", One),
    free("language-model-only", Switch),
    free("mm-encoder-only", Switch),
    // Code and files that are fetched. weightd runs no code of a checkpoint and downloads nothing.
    free("trust-remote-code", Switch),
    free("code-revision", One),
    free("hf-token", AtMostOne),
    free("ignore-patterns", Many),
    // How vLLM reads files; weightd reads them in its own way.
    free("safetensors-prefetch-num-threads", One),
    free("safetensors-prefetch-block-size", One),
    free("model-loader-extra-config", One),
    free("use-tqdm-on-load", Switch),
    free("pt-load-map-location", One),
    free("enable-hc-sp", Switch),
    free("enable-ep-weight-filter", Switch),
    free("max-parallel-loading-workers", One),
    // What an engine makes of the weights after it has them, in memory of its own, and kernels. --key-
    // extra ties content to such a choice where that is wanted.
    free("allow-deprecated-quantization", Switch),
    free("enforce-eager", Switch),
    free("disable-sliding-window", Switch),
    free("disable-cascade-attn", Switch),
    free("attention-backend", One),
    free("mamba-backend", One),
    free("mamba-ssu-algorithm", One),
    free("cudagraph-capture-sizes", Many),
    free("max-cudagraph-capture-size", One),
    free("ir-op-priority", One),
    free("enable-flashinfer-autotune", Switch),
    free("moe-backend", One),
    free("linear-backend", One),
    free("sparse-indexer-topk-backend", One),
    free("compilation-config", One),
    free("attention-config", One),
    free("kernel-config", One),
    free("optimization-level", One),
    free("performance-mode", One),
    free("weight-transfer-config", One),
    free("gdn-prefill-backend", One),
    free("kda-prefill-backend", One),
    free("kda-decode-backend", One),
    // Adapters come beside the weights of the model, which stay as they are.
    free("enable-lora", Switch),
    free("max-loras", One),
    free("max-lora-rank", One),
    free("lora-dtype", One),
    free("enable-tower-connector-lora", Switch),
    free("max-cpu-loras", One),
    free("fully-sharded-loras", Switch),
    free("lora-target-modules", Many),
    free("default-mm-loras", One),
    free("specialize-active-lora", Switch),
    free("enable-mixed-moe-lora-format", Switch),
    free("enable-moe-shared-loras", Switch),
    free("max-lora-cls-labels", One),
    // The cache of keys and values: an FP8 one uses scales that the checkpoint has either way.
    free("enable-mamba-cache-stochastic-rounding", Switch),
    free("mamba-cache-philox-rounds", One),
    free("dcp-comm-backend", One),
    free("dcp-q-replicate", Switch),
    free("dcp-kv-cache-interleave-size", One),
    free("cp-kv-cache-interleave-size", One),
    free("block-size", One),
    free("gpu-memory-utilization", One),
    free("device-memory-utilization", One),
    free("kv-cache-memory-bytes", One),
    free("kv-cache-dtype", One),
    free("num-gpu-blocks-override", One),
    free("enable-prefix-caching", Switch),
    free("prefix-caching-hash-algo", One),
    free("prefix-cache-retention-interval", One),
    free("kv-cache-dtype-skip-layers", Many),
    free("kv-sharing-fast-prefill", Switch),
    free("swa-bounded-replay", Switch),
    free("mamba-cache-dtype", One),
    free("mamba-ssm-cache-dtype", One),
    free("mamba-block-size", One),
    free("prefix-match-unit", One),
    free("mamba-cache-mode", One),
    free("enable-mamba-shared-prefix-checkpoint", Switch),
    free("replayssm-buffer-len", One),
    free("use-replayssm", Switch),
    free("kv-offloading-size", One),
    free("kv-offloading-backend", One),
    free("kv-cache-metrics", Switch),
    free("kv-cache-metrics-sample", One),
    free("disable-hybrid-kv-cache-manager", Switch),
    free("kv-transfer-config", One),
    free("kv-events-config", One),
    free("ec-transfer-config", One),
    free("ec-manager-config", One),
    // Offloading that --cpu-offload-gb and --offload-group-size turn on.
    free("offload-backend", One),
    free("cpu-offload-params", Many),
    free("offload-num-in-group", One),
    free("offload-prefetch-step", One),
    free("offload-params", Many),
    // Memory of an engine that sleeps. Mapped weights are not in that pool.
    free("enable-sleep-mode", Switch),
    free("sleep-mode-offload-cudagraph", Switch),
    free("sleep-preserve-parameter-names", Many),
    free("enable-cumem-allocator", Switch),
    free("enable-nccl-comm-suspend", Switch),
    // Images, video and audio on their way in.
    free("limit-mm-per-prompt", One),
    free("enable-mm-embeds", Switch),
    free("media-io-kwargs", One),
    free("mm-processor-kwargs", One),
    free("mm-processor-cache-gb", One),
    free("mm-processor-cache-type", One),
    free("mm-hasher-algorithm", One),
    free("mm-shm-cache-max-object-size-mb", One),
    free("mm-encoder-attn-backend", One),
    free("mm-encoder-attn-dtype", One),
    free("mm-encoder-fp8-scale-path", One),
    free("mm-encoder-fp8-scale-save-path", One),
    free("mm-encoder-fp8-scale-save-margin", One),
    free("interleave-mm-strings", Switch),
    free("skip-mm-profiling", Switch),
    free("video-pruning-rate", One),
    free("video-pruning-method", One),
    free("mm-tensor-ipc", One),
    free("mm-processor-device", One),
    free("mm-ipc-gpu-memory-gb", One),
    free("mm-device-do-normalize", Switch),
    free("disable-chunked-mm-input", Switch),
    // How the processes of an engine find each other and share work. Each finds its weights by its device,
    // wherever it was put.
    free("distributed-executor-backend", One),
    free("distributed-timeout-seconds", One),
    free("cpu-distributed-timeout-seconds", One),
    free("numa-bind", Switch),
    free("numa-bind-nodes", Many),
    free("numa-bind-cpus", Many),
    free("data-parallel-backend", One),
    free("data-parallel-hybrid-lb", Switch),
    free("data-parallel-external-lb", Switch),
    free("data-parallel-multi-port-external-lb", Nothing),
    free("enable-batch-sharded-sampling", Switch),
    // With these, and experts over data and tensor parallel ranks, vLLM splits tokens and not shared experts;
    // layout vllm holds those whole then. (`use_sequence_parallel_moe` in vLLM's configuration.)
    refused(
        "all2all-backend",
        One,
        |v| {
            [
                "allgather_reducescatter",
                "deepep_high_throughput",
                "deepep_low_latency",
                "deepep_v2",
                "flashinfer_nvlink_one_sided",
                "passthrough",
                "mori_high_throughput",
                "mori_low_latency",
                "nixl_ep",
            ]
            .contains(&v)
        },
        "with it vLLM splits shared experts otherwise than weightd does: use allgather_reducescatter, its default",
    ),
    free("enable-dbo", Switch),
    free("enable-shm-tensor-arena", Switch),
    free("ubatch-size", One),
    free("elastic-ep-max-dp-size", One),
    free("dbo-decode-token-threshold", One),
    free("dp-sync-interval", One),
    free("dbo-prefill-token-threshold", One),
    free("disable-nccl-for-dp-synchronization", Switch),
    free("ray-workers-use-nsight", Switch),
    free("disable-custom-all-reduce", Switch),
    free("worker-cls", One),
    free("worker-extension-cls", One),
    free("enable-fault-tolerance", Switch),
    free("fault-tolerance-config", One),
    // Without --enable-eplb it says nothing.
    free("eplb-config", One),
    // The order of requests.
    free("max-num-batched-tokens", One),
    free("max-num-scheduled-tokens", One),
    free("max-num-seqs", One),
    free("max-num-active-seqs", One),
    free("max-num-queued-reqs", One),
    free("max-num-queued-tokens", One),
    free("long-prefill-token-threshold", One),
    free("long-prefill-token-threshold-adaptive", Switch),
    free("scheduling-policy", One),
    free("enable-chunked-prefill", Switch),
    free("scheduler-cls", One),
    free("scheduler-reserve-full-isl", Switch),
    free("watermark", One),
    free("prefill-schedule-interval", One),
    free("async-scheduling", Switch),
    // What is logged, measured and reported.
    free("logging-config", One),
    free("log-level", One),
    free("log-config-file", One),
    free("show-hidden-metrics-for-version", One),
    free("otlp-traces-endpoint", One),
    free("collect-detailed-traces", Many),
    free("per-request-spec-decode-metrics", One),
    free("custom-histogram-buckets", One),
    free("cudagraph-metrics", Switch),
    free("enable-layerwise-nvtx-tracing", Switch),
    free("enable-mfu-metrics", Switch),
    free("enable-logging-iteration-details", Switch),
    free("jit-monitor-mode", One),
    free("jit-monitor-verbose", Switch),
    free("profiler-config", One),
    free("disable-log-stats", Nothing),
    free("aggregate-engine-logging", Nothing),
    // The rest of a process's life.
    free("additional-config", One),
    free("fail-on-environ-validation", Switch),
    free("shutdown-timeout", One),
];
