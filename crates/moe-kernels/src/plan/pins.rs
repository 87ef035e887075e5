//! The kernels that cards get, over numbers of rows.
//!
//! `pins.txt` holds the choices for every card for which kernels are built. A change must not alter them by accident.
//! If a change is meant to alter one, replace the file by what the failing test prints.

use std::fmt::Write;

use candle_core::DType;

use super::*;
use crate::scheme::{QuantGroup, QuantScheme};

/// The numbers of rows that are tested: around every bound of the forms, and the buckets of captured steps.
const ROWS: [usize; 34] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 47, 48, 64, 65, 96, 128, 255, 256, 384, 511, 512, 768,
    1023, 1024, 2048, 4096, 8191, 8192, 16_384,
];

/// Capability, shared memory of a block (CUDA's table of technical specifications) and SMs (of A100, A40, L40S, H200).
const CARDS: [((u32, u32), usize, usize); 4] =
    [((8, 0), 166_912, 108), ((8, 6), 101_376, 84), ((8, 9), 101_376, 142), ((9, 0), 232_448, 132)];

fn card((capability, shared, sms): ((u32, u32), usize, usize)) -> Gpu {
    Gpu::new(capability, shared, sms).unwrap()
}

/// The three number formats of the measured checkpoints.
fn formats() -> [(&'static str, Option<QuantScheme>, DType); 4] {
    let group = QuantGroup::Size(128);
    let int4 = |act_order| QuantScheme::int(4, group).with_zero_points(true).with_act_order(act_order);
    let fp8 = QuantScheme::fp8(QuantGroup::Block { n: 128, k: 128 });
    [
        ("bf16", None, DType::F32),
        ("int4", Some(int4(false)), DType::F16),
        ("int4 with act-order", Some(int4(true)), DType::F16),
        ("fp8", Some(fp8), DType::F32),
    ]
}

fn weights(scheme: QuantScheme, scales: DType, gate_up: bool) -> QuantWeights {
    let order = if scheme.act_order && !gate_up { ColumnOrder::Sorted } else { ColumnOrder::Input };
    QuantWeights { scheme, scales, gate_up, in_blocks: true, order }
}

/// Questions, and the answer of a machine.
type Table = Vec<(String, String)>;

/// The runs of rows that take the same kernel: `1-4 linear_stream`.
fn runs(kernel: impl Fn(usize) -> String) -> String {
    let mut found: Vec<(usize, usize, String)> = Vec::new();
    for rows in ROWS {
        let kernel = kernel(rows);
        match found.last_mut() {
            Some((_, last, name)) if *name == kernel => *last = rows,
            _ => found.push((rows, rows, kernel)),
        }
    }
    let text = |(first, last, name): &(usize, usize, String)| format!("{first}-{last} {name}");
    found.iter().map(text).collect::<Vec<_>>().join("; ")
}

fn chosen<F: Form>(call: &F::Call, machine: &Machine) -> String {
    F::choose(call, machine).map_or_else(|| "none".to_string(), |form| form.kernel(call))
}

/// Products of Qwen3-30B-A3B (qkv, o_proj, vocabulary) and of a wide model.
fn products(machine: &Machine, table: &mut Table) {
    for (format, scheme, scales) in formats() {
        for (n, k) in [(5120, 2048), (2048, 4096), (151_936, 2048), (7168, 8192), (96, 96)] {
            let quant = scheme.map(|scheme| weights(scheme, scales, false));
            let call =
                |rows| LinearCall { rows, n, k, dtype: DType::BF16, quant, bias: false, aligned: true };
            let name = |what: &str| format!("{what} {format} [{n}, {k}]");
            table.push((name("linear"), runs(|rows| chosen::<LinearForm>(&call(rows), machine))));
            table.push((name("fused"), runs(|rows| chosen::<FusedLinearForm>(&call(rows), machine))));
        }
    }
    let floats = |rows| LinearCall {
        rows,
        n: 5120,
        k: 2048,
        dtype: DType::F32,
        quant: None,
        bias: true,
        aligned: true,
    };
    table.push(("linear f32".into(), runs(|rows| chosen::<LinearForm>(&floats(rows), machine))));
}

/// Experts of Qwen3-30B-A3B and DeepSeek-V2-Lite, with separate routers and with routers in their launches.
fn experts(machine: &Machine, table: &mut Table) {
    for (format, scheme, scales) in formats() {
        for (model, num, top_k, inter) in [("qwen3", 128, 8, 768), ("deepseek", 64, 6, 1408)] {
            let packs = scheme.map(|scheme| [true, false].map(|gate_up| weights(scheme, scales, gate_up)));
            // Act-order sorts the columns of w13 and of w2 when they are loaded.
            let quant = packs.map(|[w13, w2]| match format {
                "int4 with act-order" => [
                    QuantWeights { order: ColumnOrder::Sorted, ..w13 },
                    QuantWeights { order: ColumnOrder::Input, ..w2 },
                ],
                _ => [w13, w2],
            });
            let sizes = ExpertsCall {
                tokens: 1,
                top_k,
                num_ids: num,
                num_local: num,
                hidden: 2048,
                inter,
                quant,
                passes: 1,
                epilogue: EpilogueCall::PLAIN,
            };
            let call = |tokens| ExpertsCall { tokens, ..sizes };
            let name = |what: &str| format!("{what} {format} {model}");
            table.push((name("experts"), runs(|rows| chosen::<ExpertsForm>(&call(rows), machine))));
            for fusion in [Fusion::Nothing, Fusion::NormAdd, Fusion::AddNorm] {
                let call = |tokens| MonolithicCall {
                    experts: call(tokens),
                    dtype: DType::BF16,
                    gate: DType::BF16,
                    fusion,
                };
                let text = runs(|rows| chosen::<MonolithicForm>(&call(rows), machine));
                table.push((name(&format!("experts with router, {fusion:?},")), text));
            }
            let copies = |tokens| CopiesCall { tokens, top_k, experts: num, quant };
            table.push((name("copies"), runs(|rows| chosen::<CopiesForm>(&copies(rows), machine))));
        }
    }
    for (name, gate) in [("router", DType::BF16), ("router, gate in f32", DType::F32)] {
        let router = RouterCall { hidden: 2048, experts: 128, top_k: 8, dtype: DType::BF16, gate };
        table.push((name.into(), chosen::<RouterForm>(&router, machine)));
    }
}

/// Attention of both models and of other heads, of decoding rows and of prompts.
fn attention(machine: &Machine, table: &mut Table) {
    for (model, num_heads, head_dim, value_dim, latent) in [
        ("qwen3", 32, 128, 128, false),
        ("heads of 64", 16, 64, 64, false),
        ("heads of 256", 16, 256, 256, false),
        ("deepseek", 16, 576, 512, true),
    ] {
        for (step, one_row_each) in [("decode", true), ("prompts", false)] {
            let call = |rows| AttentionCall {
                rows,
                one_row_each,
                num_heads,
                head_dim,
                value_dim,
                latent,
                sinks: !latent,
                gates: false,
                dtype: DType::BF16,
                block_size: Some(16),
                aligned: true,
            };
            let text = runs(|rows| chosen::<AttentionForm>(&call(rows), machine));
            table.push((format!("attention {model}, {step}"), text));
        }
    }
    let row = AttentionCall {
        rows: 256,
        one_row_each: true,
        num_heads: 32,
        head_dim: 128,
        value_dim: 128,
        latent: false,
        sinks: false,
        gates: false,
        dtype: DType::BF16,
        block_size: Some(16),
        aligned: true,
    };
    let mixed = |prompt_scores| MixedCall {
        decode: row,
        num_kv_heads: 4,
        prompts: AttentionCall { rows: 900, one_row_each: false, ..row },
        decode_scores: 204_800,
        prompt_scores,
    };
    for scores in [1, 240_000, 3_000_000, 4_640_000, 4_660_000, 33_000_000] {
        table.push((format!("mixed step of {scores} scores"), chosen::<MixedForm>(&mixed(scores), machine)));
    }
    let per_head = |rows| PerHeadCall {
        rows,
        head_dim: 128,
        latent: 512,
        neighbour: Some("latent_query"),
        dtype: DType::BF16,
    };
    table.push(("per head".into(), runs(|rows| chosen::<PerHeadForm>(&per_head(rows), machine))));
    let prompt = |rows| PromptCall {
        rows,
        positions: None,
        num_heads: 16,
        dims: [512, 128, 64, 128],
        dtype: DType::BF16,
        aligned: true,
    };
    table.push(("latent prompts".into(), runs(|rows| chosen::<PromptForm>(&prompt(rows), machine))));
}

/// All machines: each card with every setting.
fn machines() -> Vec<(String, Machine)> {
    let mut machines = Vec::new();
    for place in CARDS {
        for fp8_activations in [Fp8Activations::Off, Fp8Activations::Auto] {
            for batch_invariant in [false, true] {
                let ((major, minor), ..) = place;
                let fp8 = if fp8_activations == Fp8Activations::Off { "" } else { "+fp8" };
                let invariant = if batch_invariant { "+invariant" } else { "" };
                let machine = Machine { gpu: Some(card(place)), batch_invariant, fp8_activations };
                machines.push((format!("{major}.{minor}{fp8}{invariant}"), machine));
            }
        }
    }
    machines
}

/// Every question, with the answer of a machine.
fn asked(machine: &Machine) -> Table {
    let mut own = Table::new();
    products(machine, &mut own);
    experts(machine, &mut own);
    attention(machine, &mut own);
    own
}

/// Each question with its answers, and the machines that give them.
fn table() -> String {
    let mut answers: Vec<(String, Vec<(String, String)>)> = Vec::new();
    for (name, machine) in machines() {
        for (at, (question, answer)) in asked(&machine).into_iter().enumerate() {
            if at == answers.len() {
                answers.push((question, Vec::new()));
            }
            let given = &mut answers[at].1;
            match given.iter_mut().find(|(other, _)| *other == answer) {
                Some((_, names)) => *names = format!("{names} {name}"),
                None => given.push((answer, name.clone())),
            }
        }
    }
    let mut text = String::new();
    for (question, given) in answers {
        writeln!(text, "{question}").unwrap();
        for (answer, names) in given {
            writeln!(text, "  {names}\n    {answer}").unwrap();
        }
    }
    text
}

#[test]
fn cards_that_were_built_for_get_what_they_got() {
    let table = table();
    let pinned = include_str!("pins.txt");
    assert!(table == pinned, "{table}");
}

/// Stages that are also built as PTX, or are no kernels of this project, or are several launches that are tested by
/// themselves.
const PORTABLE: [&str; 15] = [
    "any_linear",
    "any_quant_linear",
    "any_attention",
    "per_head",
    "cublas",
    "any_dequantise + cublas",
    "quant_dequantise + cublas",
    "order_rows + quant_dequantise + cublas",
    "apart",
    "in latent space",
    "gate product, then route",
    "decoding rows, then prompts",
    "one copy of each expert",
    "all copies of each expert",
    // No experts fused in one call: the oracle then takes experts of plain products (`cuda`).
    "none",
];

#[test]
fn cards_without_machine_code_get_portable_kernels_and_libraries() {
    let cards = [
        Gpu::new((9, 1), 232_448, 132),
        Gpu::new((10, 0), 232_448, 148),
        Gpu::new((12, 0), 101_376, 170),
        Gpu::ptx_only((9, 0), 232_448, 132),
    ];
    for gpu in cards.map(Result::unwrap) {
        for batch_invariant in [false, true] {
            let fp8_activations = Fp8Activations::On;
            let machine = Machine { gpu: Some(gpu), batch_invariant, fp8_activations };
            let mut products = 0;
            for (question, answer) in asked(&machine) {
                for run in answer.split("; ") {
                    // In questions about numbers of rows, the rows come before the name.
                    let kernel = run
                        .split_once(' ')
                        .filter(|(rows, _)| rows.contains('-'))
                        .map_or(run, |(_, name)| name);
                    assert!(PORTABLE.contains(&kernel), "{gpu:?}: {question}: {run}");
                    assert!(gpu.libraries || !kernel.contains("cublas"), "{gpu:?}: {question}: {run}");
                    products += usize::from(kernel == "any_linear" || kernel == "any_quant_linear");
                }
            }
            assert!(products > 0, "{gpu:?}");
        }
    }
}

#[test]
fn kernels_that_do_not_fit_a_blocks_shared_memory_are_refused() {
    let small = Gpu { block_shared_memory: 101_376, ..Gpu::HOPPER };
    let machine = Machine { gpu: Some(small), ..Machine::default() };
    let hopper = Machine { gpu: Some(Gpu::HOPPER), ..machine };
    let experts = ExpertsCall {
        tokens: 512,
        top_k: 8,
        num_ids: 128,
        num_local: 128,
        hidden: 2048,
        inter: 768,
        quant: None,
        passes: 1,
        epilogue: EpilogueCall::PLAIN,
    };
    // A ring of 192 KiB, room for results, barriers and a table of 128 experts.
    let needs = 192 * 1024 + 16 * 1024 + 4 * 1024;
    assert_eq!(experts.fits_wide(&machine), Err(Reason::SharedMemory { needs, has: 101_376 }));
    assert_eq!(experts.fits_wide(&hopper), Ok(()));
    assert_eq!(experts.fits_tensor(&hopper), Ok(()));
    assert!(matches!(experts.fits_tensor(&machine), Err(Reason::SharedMemory { .. })));
    assert_eq!(ExpertsForm::choose(&experts, &machine), Some(ExpertsForm::Grouped));
    for (question, answer) in asked(&machine) {
        for kernel in
            ["wgmma", "attention_latent", "attention_expanded", "linear_tensor", "experts_tensor", "wide"]
        {
            assert!(!answer.contains(kernel), "{question}: {answer}");
        }
    }
}
