//! Table tests of the oracle: specifications and the expected choices and reasons.

use candle_core::DType;
use moe_kernels::plan::Gpu;
use moe_kernels::{Activation, ActivationFormat, ExpertsSpec, QuantGroup, QuantScheme, RoutingMethod};

use super::*;

/// Qwen3-30B-A3B in bf16 on one CPU rank.
pub(crate) fn spec() -> ExpertsSpec {
    ExpertsSpec {
        num_experts: 128,
        num_local_experts: 128,
        top_k: 8,
        hidden_size: 2048,
        intermediate_size: 768,
        dtype: DType::BF16,
        quant: QuantScheme::NONE,
        activation: Activation::SwiGlu,
        has_bias: false,
        activation_format: ActivationFormat::Standard,
        routing: RoutingMethod::Renormalize,
        apply_router_weight_on_input: false,
        tp_size: 1,
        ep_size: 1,
        batch_invariant: false,
        gpu: None,
    }
}

type Change = fn(&mut ExpertsSpec);

/// Returns "chosen; rejected (check), ..", or the error's first line.
fn answer(change: Change, choice: Option<&str>) -> String {
    let mut spec = spec();
    change(&mut spec);
    match select(&spec, choice) {
        Ok(s) => {
            let mut rejected: Vec<String> =
                s.rejected.iter().map(|r| format!("{} ({})", r.backend, r.reason.check())).collect();
            if spec.quant == QuantScheme::NONE {
                assert_eq!(rejected.pop().as_deref(), Some("emulation (not_quantised)"));
            }
            format!("{}; {}", s.chosen, rejected.join(", "))
        }
        Err(e) => e.to_string().lines().next().unwrap_or_default().to_string(),
    }
}

const BATCHED: Change = |s| s.activation_format = ActivationFormat::BatchedExperts;

const ON_CPU: &str = "cpu; cuda_fused (device), cuda_fused_listed (device), cuda (device), cuda_batched (device), \
                      cpu_batched (activation_format)";

const BATCHED_ON_CPU: &str = "cpu_batched; cuda_fused (device), cuda_fused_listed (device), cuda (device), \
                              cuda_batched (device), cpu (activation_format)";

const INT4: Change = |s| {
    let group = QuantGroup::Size(128);
    s.quant = QuantScheme::int(4, group);
};

const INT4_ON_CPU: &str = "cpu; cuda_fused (device), cuda_fused_listed (device), cuda (device), \
                           cuda_batched (device), cpu_batched (activation_format), emulation (lower_priority)";

const OAI: Activation = Activation::SwiGluOai { alpha: 1.702, limit: 7.0 };

const ON_CUDA: Change = |s| s.gpu = Some(Gpu::HOPPER);

#[test]
fn the_table() {
    let table: &[(Change, Option<&str>, &str)] = &[
        (|_| (), None, ON_CPU),
        (|_| (), Some("auto"), ON_CPU),
        (|_| (), Some("cpu"), ON_CPU),
        (BATCHED, None, BATCHED_ON_CPU),
        (BATCHED, Some("cpu_batched"), BATCHED_ON_CPU),
        (|s| s.dtype = DType::F32, None, ON_CPU),
        (|s| s.dtype = DType::F16, None, ON_CPU),
        (|s| s.activation = Activation::Gelu, None, ON_CPU),
        (|s| s.activation = Activation::GeluTanh, None, ON_CPU),
        (|s| s.activation = Activation::SwiGluOai { alpha: 1.702, limit: 7. }, None, ON_CPU),
        (|s| s.has_bias = true, None, ON_CPU),
        (|s| s.batch_invariant = true, None, ON_CPU),
        // These cases have expert parallelism: fewer local experts, none at all, odd sizes.
        (|s| (s.ep_size, s.num_local_experts) = (8, 16), None, ON_CPU),
        (|s| (s.ep_size, s.num_local_experts) = (200, 0), None, ON_CPU),
        (|s| (s.hidden_size, s.intermediate_size) = (3, 1), None, ON_CPU),
        (|s| s.routing = RoutingMethod::Custom, None, ON_CPU),
        (|s| (s.top_k, s.apply_router_weight_on_input) = (1, true), None, ON_CPU),
        // These have tensor parallelism, which cuts experts of token rows: 384 columns are a multiple of 64, 96 are
        // not.
        (
            |s| (s.tp_size, s.intermediate_size, s.gpu) = (2, 384, Some(Gpu::HOPPER)),
            None,
            "cuda_fused; cuda_fused_listed (tensor_parallel), cuda (lower_priority), cuda_batched (tensor_parallel), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.tp_size, s.intermediate_size, s.gpu) = (8, 96, Some(Gpu::HOPPER)),
            None,
            "cuda; cuda_fused (shape), cuda_fused_listed (tensor_parallel), cuda_batched (tensor_parallel), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| s.tp_size = 2,
            None,
            "cpu; cuda_fused (device), cuda_fused_listed (device), cuda (device), cuda_batched (device), \
             cpu_batched (tensor_parallel)",
        ),
        // These are on CUDA: the fused kernels if they support the specification, or else the grouped ones.
        (
            ON_CUDA,
            None,
            "cuda_fused; cuda_fused_listed (activation_format), cuda (lower_priority), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device)",
        ),
        // The program has no machine code for this card, so the fused experts cannot run.
        (
            |s| s.gpu = Gpu::new((12, 0), 101_376, 170).ok(),
            None,
            "cuda; cuda_fused (device), cuda_fused_listed (device), cuda_batched (activation_format), \
             cpu (device), cpu_batched (device)",
        ),
        (
            ON_CUDA,
            Some("cuda"),
            "cuda; cuda_fused (not_requested), cuda_fused_listed (activation_format), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.dtype) = (Gpu::new((8, 0), 166_912, 108).ok(), DType::F16),
            None,
            "cuda; cuda_fused (dtype), cuda_fused_listed (dtype), cuda_batched (activation_format), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.activation) = (Some(Gpu::HOPPER), Activation::Gelu),
            None,
            "cuda; cuda_fused (activation), cuda_fused_listed (activation), cuda_batched (activation_format), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.has_bias, s.activation) = (Some(Gpu::HOPPER), true, OAI),
            None,
            "cuda_fused; cuda_fused_listed (activation_format), cuda (lower_priority), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.has_bias) = (Gpu::new((8, 0), 166_912, 108).ok(), true),
            None,
            "cuda; cuda_fused (device), cuda_fused_listed (activation_format), cuda_batched (activation_format), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.activation) = (Gpu::new((8, 0), 166_912, 108).ok(), OAI),
            None,
            "cuda; cuda_fused (device), cuda_fused_listed (activation_format), cuda_batched (activation_format), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.hidden_size) = (Some(Gpu::HOPPER), 96),
            None,
            "cuda; cuda_fused (shape), cuda_fused_listed (shape), cuda_batched (activation_format), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.top_k, s.apply_router_weight_on_input) = (Some(Gpu::HOPPER), 1, true),
            None,
            "cuda; cuda_fused (router_weight_on_input), cuda_fused_listed (activation_format), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.activation_format) = (Some(Gpu::HOPPER), ActivationFormat::BatchedExperts),
            None,
            "cuda_batched; cuda_fused (activation_format), cuda_fused_listed (activation_format), \
             cuda (activation_format), cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.activation_format) = (Some(Gpu::HOPPER), ActivationFormat::Listed),
            None,
            "cuda_fused_listed; cuda_fused (activation_format), cuda (lower_priority), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device)",
        ),
        (|s| s.activation_format = ActivationFormat::Listed, None, ON_CPU),
        (
            |s| {
                (s.gpu, s.activation_format) = (Some(Gpu::HOPPER), ActivationFormat::Listed);
                s.hidden_size = 96;
            },
            None,
            "cuda; cuda_fused (shape), cuda_fused_listed (shape), cuda_batched (activation_format), \
             cpu (device), cpu_batched (device)",
        ),
        (
            |s| {
                (s.gpu, s.activation_format) = (Some(Gpu::HOPPER), ActivationFormat::Listed);
                (s.top_k, s.apply_router_weight_on_input) = (1, true);
            },
            None,
            "cuda; cuda_fused (activation_format), cuda_fused_listed (router_weight_on_input), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device)",
        ),
        (
            |s| (s.gpu, s.batch_invariant) = (Some(Gpu::HOPPER), true),
            None,
            "cuda_fused; cuda_fused_listed (activation_format), cuda (lower_priority), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device)",
        ),
        // These have quantised weights.
        (INT4, None, INT4_ON_CPU),
        (|s| s.quant = QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 }), None, INT4_ON_CPU),
        (
            |s| (INT4(s), BATCHED(s)).0,
            None,
            "cpu_batched; cuda_fused (device), cuda_fused_listed (device), cuda (device), cuda_batched (device), \
             cpu (activation_format), emulation (lower_priority)",
        ),
        (
            INT4,
            Some("emulation"),
            "emulation; cuda_fused (device), cuda_fused_listed (device), cuda (device), cuda_batched (device), \
             cpu (not_requested), cpu_batched (activation_format)",
        ),
        (
            |s| (INT4(s), ON_CUDA(s)).0,
            None,
            "cuda_fused; cuda_fused_listed (activation_format), cuda (lower_priority), \
             cuda_batched (activation_format), cpu (device), cpu_batched (device), emulation (lower_priority)",
        ),
        (
            |s| (INT4(s), ON_CUDA(s), s.dtype = DType::F32).0,
            None,
            "cuda; cuda_fused (dtype), cuda_fused_listed (dtype), cuda_batched (activation_format), cpu (device), \
             cpu_batched (device), emulation (lower_priority)",
        ),
        (
            |s| {
                ON_CUDA(s);
                let group = QuantGroup::Size(128);
                s.quant = QuantScheme::int(3, group);
            },
            Some("cuda_fused"),
            "the MoE backend that was asked for does not fit: cuda_fused: does not read weights of quantisation \
             scheme int3 group 128; use auto or another backend",
        ),
        (
            |_| (),
            Some("emulation"),
            "the MoE backend that was asked for does not fit: emulation: turns quantised weights into floats, and \
             these are floats; use auto or another backend",
        ),
        (|s| (INT4(s), s.dtype = DType::F64).0, None, "no MoE backend runs this configuration:"),
        // These are refused.
        (|s| s.dtype = DType::F64, None, "no MoE backend runs this configuration:"),
        (
            |_| (),
            Some("cpu_batched"),
            "the MoE backend that was asked for does not fit: cpu_batched: takes rows in the \
             BatchedExperts format, but prepare hands over Standard; use auto or another backend",
        ),
        (
            |s| s.gpu = Some(Gpu::HOPPER),
            Some("cpu"),
            "the MoE backend that was asked for does not fit: cpu: runs on the CPU, but this rank \
             computes on CUDA with compute capability 9.0; use auto or another backend",
        ),
        (
            |_| (),
            Some("marlin"),
            "unknown MoE backend \"marlin\"; expected auto or one of cuda_fused, cuda_fused_listed, cuda, \
             cuda_batched, cpu, cpu_batched, emulation",
        ),
        (
            |_| (),
            Some(""),
            "unknown MoE backend \"\"; expected auto or one of cuda_fused, cuda_fused_listed, cuda, \
             cuda_batched, cpu, cpu_batched, emulation",
        ),
        // These specifications make no sense.
        (|s| s.top_k = 0, None, "invalid experts specification: top_k must be at least 1, got 0"),
        (|s| s.ep_size = 0, None, "invalid experts specification: ep_size must be at least 1, got 0"),
        (
            |s| s.hidden_size = 0,
            Some("cpu"),
            "invalid experts specification: hidden_size must be at least 1, got 0",
        ),
        (
            |s| s.apply_router_weight_on_input = true,
            None,
            "invalid experts specification: apply_router_weight_on_input needs top_k = 1, got 8",
        ),
    ];
    for (i, (change, choice, want)) in table.iter().enumerate() {
        assert_eq!(&answer(*change, *choice), want, "row {i}");
    }
}

#[test]
fn when_nothing_fits_every_backend_is_listed() {
    let error = select(&ExpertsSpec { tp_size: 4, ..spec() }, Some("cpu_batched")).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("\n  cpu_batched: computes whole experts, but tp_size = 4"), "{text}");
    let error = select(&ExpertsSpec { dtype: DType::F64, ..spec() }, None).unwrap_err();
    let text = error.to_string();
    for backend in Backend::ALL {
        assert!(text.contains(&format!("\n  {backend}: ")), "{text}");
    }
}

#[test]
fn a_refused_choice_lists_what_would_fit() {
    let text = select(&spec(), Some("cpu_batched")).unwrap_err().to_string();
    assert!(text.ends_with("\n  cpu: fits"), "{text}");
}

#[test]
fn what_fits_besides_the_choice_is_rejected_with_a_reason() {
    use Backend::{Cpu, CpuBatched};
    let both = [(Cpu, Ok(())), (CpuBatched, Ok(()))];
    let rejection = |asked| decide(&both, asked).map(|(chosen, r)| (chosen, r[0].to_string())).unwrap();
    assert_eq!(rejection(None), (Cpu, "cpu_batched: fits, but cpu comes first".into()));
    assert_eq!(rejection(Some(CpuBatched)), (CpuBatched, "cpu: fits, but cpu_batched was asked for".into()));
}

#[test]
fn names_are_unique_and_parse_back() {
    for backend in Backend::ALL {
        assert_eq!(backend.name().parse(), Ok(backend));
        assert_eq!(serde_json::to_value(backend).unwrap(), backend.name());
    }
}

#[test]
fn the_explanation_is_json() {
    let spec = ExpertsSpec { activation: Activation::SwiGluOai { alpha: 1.702, limit: 7. }, ..spec() };
    let json = serde_json::to_value(select(&spec, None).unwrap()).unwrap();
    let on_cuda = |backend| {
        let text = "runs on CUDA, but this rank computes on the CPU";
        serde_json::json!({"backend": backend, "reason": {"check": "device", "text": text}})
    };
    let want = serde_json::json!({
        "chosen": "cpu",
        "rejected": [on_cuda("cuda_fused"), on_cuda("cuda_fused_listed"), on_cuda("cuda"), on_cuda("cuda_batched"), {
            "backend": "cpu_batched",
            "reason": {
                "check": "activation_format",
                "text": "takes rows in the BatchedExperts format, but prepare hands over Standard"
            }
        }, {
            "backend": "emulation",
            "reason": {"check": "not_quantised", "text": "turns quantised weights into floats, and these are floats"}
        }],
        "spec": {
            "num_experts": 128, "num_local_experts": 128, "top_k": 8, "hidden_size": 2048,
            "intermediate_size": 768, "dtype": "bf16", "quant": "none",
            "activation": "swiglu_oai(alpha = 1.702, limit = 7)", "has_bias": false,
            "activation_format": "standard", "routing": "Renormalize",
            "apply_router_weight_on_input": false, "tp_size": 1, "ep_size": 1,
            "batch_invariant": false, "compute_capability": null
        }
    });
    assert_eq!(json, want);
}
