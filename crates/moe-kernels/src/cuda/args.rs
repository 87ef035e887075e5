//! The argument structs of launchers with many arguments, and the codes of `cuda/codes.cuh`. The headers
//! `cuda/*/args.cuh` define and document the structs. The test below checks that both sides have the same names and
//! types in the same order, and therefore the same sizes and offsets: C and `#[repr(C)]` use the same layout.

use std::ffi::c_void;

use candle_core::{DType, Result, bail};

use super::quant_format::QuantFormat;
use crate::tags::GateScoring;

/// A device pointer that a launcher reads; 16-byte aligned for the bf16 kernels, null where the header allows it.
pub(crate) type In = *const c_void;
/// A device pointer that a launcher writes.
pub(crate) type Out = *mut c_void;

/// Type of an array's elements.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32 = 0,
    Bf16 = 1,
    F16 = 2,
}

impl Dtype {
    pub(crate) fn of(op: &str, dtype: DType) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::BF16 => Ok(Self::Bf16),
            DType::F16 => Ok(Self::F16),
            other => bail!("{op}: expected dtype f32, bf16 or f16, got {}", other.as_str()),
        }
    }
}

/// How a kernel's f32 result is written to the output.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Stored.
    F32 = 0,
    /// Rounded and stored.
    Bf16 = 1,
    /// Added to the existing f32 values: the residual stream.
    AddF32 = 2,
}

impl Output {
    /// Results are written to a new array of this dtype, f32 or bf16.
    pub(crate) fn stored_as(dtype: DType) -> Self {
        if dtype == DType::BF16 { Self::Bf16 } else { Self::F32 }
    }

    /// The factor of the existing output values: 0 or 1.
    pub(crate) fn kept(self) -> f32 {
        if self == Self::AddF32 { 1. } else { 0. }
    }
}

/// Declares the structs (fields of one type together, as in the headers) and the table that the test needs.
macro_rules! arguments {
    ($($name:ident { $($($field:ident)+ : $ty:ident,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $name { $($(pub $field: $ty,)+)* }
        )*

        /// (name, \[(field, type)\]) of all structs.
        #[cfg(test)]
        const STRUCTS: &[(&str, &[(&str, &str)])] =
            &[$((stringify!($name), &[$($((stringify!($field), stringify!($ty)),)+)*]),)*];
    };
}

arguments! {
    LinearStreamArgs {
        x norm: In, eps: f32, w bias: In, out: Out, output: Output, m n k: i32,
    }
    LinearTensorArgs {
        x w bias: In, out: Out, output: Output, m n k splits: i32,
    }
    QkNormRopeArgs {
        qkv q_norm k_norm: In, eps: f32, cos sin angle_index slots: In, q_out k_cache v_cache: Out,
        dtype stream_dtype q_dtype norm_dtype: Dtype, tokens heads kv_heads head_dim block_size: i32,
        qkv_row: i32, num_slots: i64,
    }
    PagedAttentionArgs {
        q k_cache v_cache query_start_loc positions block_tables: In, out: Out, dtype q_dtype: Dtype,
        tokens sequences max_blocks heads kv_heads head_dim value_dim value_row num_blocks block_size: i32,
        scale: f32, window invariant: i32, counters partials: Out, splits: i32, sinks gates: In, gate_row: i32,
    }
    MlaLatentArgs {
        compressed norm: In, eps: f32, cos sin: In, latent_out rotated_out: Out, dtype: Dtype,
        rows latent rope: i32,
    }
    MlaCacheArgs {
        kv rotated slots: In, k_cache v_cache: Out, dtype kv_dtype: Dtype,
        rows heads key rope value block_size: i32, num_slots: i64,
    }
    MlaQueryArgs {
        q cos sin: In, plain out: Out, dtype out_dtype: Dtype, rows heads plain_dim rope width: i32,
    }
    MlaRowsArgs {
        queries latents norm: In, eps: f32, cos sin slots: In, plain out k_cache: Out, dtype out_dtype: Dtype,
        rows heads plain_dim rope width latent query_row latent_row: i32, num_slots: i64,
    }
    MlaExpandArgs {
        cache query_start_loc positions block_tables: In, latents keys bases: Out,
        sequences max_blocks block_size heads all: i32,
    }
    PerHeadArgs {
        x w: In, out: Out, dtype out_dtype: Dtype, rows heads n k stride invariant: i32,
    }
    AttentionDecodeArgs {
        qkv q_norm k_norm: In, eps: f32, cos sin angle_index slots positions block_tables: In,
        max_blocks: i32, k_cache v_cache out workspace: Out, rows heads kv_heads head_dim block_size: i32,
        scale: f32, window splits: i32, num_slots: i64, norm_dtype: Dtype, qkv_row: i32, sinks gates: In,
        gate_row: i32,
    }
    StepRoutingArgs {
        heat routed: Out, forced: In, stride keep_weights: i32,
    }
    CopiesArgs {
        log2phy: In, width hashed: i32, first_row: u32,
    }
    GateRouteArgs {
        x gate gate_bias correction_bias valid: In, logits topk_ids topk_weights: Out,
        tokens hidden experts top_k: i32, scoring: GateScoring, raw_logits renormalize: i32,
        scale softcap: f32, counts buckets: Out, expert_map: In, invariant shared: i32, shared_weight: f32,
        groups kept_groups: i32, routing: StepRoutingArgs, copies: CopiesArgs,
    }
    BalanceIdsArgs {
        step: In, ids: Out, seed: u64, rows layers top_k experts: i32, first_row first_layer: u32,
    }
    AlignTokensArgs {
        topk_ids expert_map: In, slots num_ids num_local tile_rows: i32,
        offsets sorted tiles num_tiles: Out,
    }
    ExpertEpilogueArgs {
        w13_bias w2_bias: In, alpha limit shift: f32,
    }
    ExpertsStreamArgs {
        x w13 w2 topk_ids topk_weights expert_map: In, act slot_rows out flags: Out,
        flag_words tokens top_k num_ids num_local hidden inter: i32, output: Output,
        epilogue: ExpertEpilogueArgs,
    }
    ExpertsTensorArgs {
        x w13 w2 slots counts: In, bucket: i32, act slot_rows counters: Out,
        tokens top_k num_ids num_local hidden inter: i32, epilogue: ExpertEpilogueArgs,
    }
    ExpertsGroupedArgs {
        x w13 w2 offsets sorted tiles num_tiles: In, act slot_rows: Out,
        slots top_k num_local hidden inter: i32,
    }
    CombineArgs {
        slot_rows topk_ids topk_weights expert_map: In, out: Out,
        tokens top_k num_ids num_local hidden: i32, rows: Dtype, output: Output,
    }
    ExpertResidencyArgs {
        topk_ids: In, place heat held pending map exchanges counts: Out,
        count num_experts num_slots first: i32,
    }
    ExpertExchangeArgs {
        exchanges: In, w13 w2 homes: Out, w13_bytes w2_bytes: i64,
    }
    LayerStreamArgs {
        x norm: In, eps: f32, gate gate_bias correction_bias valid: In, topk_ids topk_weights: Out,
        w13 w2 expert_map: In, out: Out, output: Output, state: Out,
        tokens hidden inter num_ids num_local top_k: i32, scoring: GateScoring,
        raw_logits renormalize: i32, scale softcap: f32, shared: i32, shared_weight: f32,
        groups kept_groups: i32, routing: StepRoutingArgs, epilogue: ExpertEpilogueArgs,
    }
    RopeRowsArgs {
        positions rope_len inv_freq: In, half: i32, attention_factor theta factor max_len: f32,
        cos sin: Out, rows: i32,
    }
    CopyStatesArgs {
        list rows: In, arrays copies: i32,
    }
    CausalConvArgs {
        projected weight query_start_loc positions numbers: In, states out: Out,
        tokens sequences num_states stride channels width: i32,
    }
    GatedDeltaArgs {
        mixed projected a_log dt_bias query_start_loc positions numbers: In, states out: Out,
        tokens sequences num_states key_heads value_heads key_dim value_dim: i32, workspace: Out, chunks: i32,
    }
    GatedNormArgs {
        x z weight: In, out: Out, dtype: Dtype, rows heads dim stride: i32, eps: f32,
    }
    AnyLinearArgs {
        x w bias: In, out: Out, dtype out_dtype: Dtype, rows n k invariant: i32,
    }
    AnyGateUpArgs {
        x offsets in_rows w13 bias: In, out: Out, dtype: Dtype, activation: i32, alpha limit: f32,
        x_rows rows experts width hidden invariant: i32,
    }
    AnyGatedArgs {
        gate up: In, out: Out, dtype: Dtype, rows width stride activation: i32, alpha limit: f32,
    }
    AnyDownArgs {
        x offsets out_rows w2 bias: In, out: Out, dtype: Dtype,
        rows num_out experts hidden width invariant: i32,
    }
    QuantPack {
        q scales zeros perm: In, experts n k n_tiles k_packed group groups: i64, format: QuantFormat,
        scale_dtype: Dtype, scale_rows gate_up: i32,
    }
    AnyQuantLinearArgs {
        x: In, w: QuantPack, bias: In, out: Out, dtype out_dtype: Dtype, rows: i32,
    }
    AnyQuantGateUpArgs {
        x offsets in_rows: In, w13: QuantPack, bias: In, out: Out, dtype: Dtype, activation: i32,
        alpha limit: f32, x_rows rows: i32,
    }
    AnyQuantDownArgs {
        x offsets out_rows: In, w2: QuantPack, bias: In, out: Out, dtype: Dtype, rows num_out: i32,
    }
    QuantLinearStreamArgs {
        x norm: In, eps: f32, w: QuantPack, bias: In, out: Out, output: Output, m: i32,
    }
    QuantLayerStreamArgs {
        x norm: In, eps: f32, gate gate_bias correction_bias valid: In, topk_ids topk_weights: Out,
        w13 w2: QuantPack, expert_map: In, out: Out, output: Output, state: Out, tokens num_ids top_k: i32,
        scoring: GateScoring, raw_logits renormalize: i32, scale softcap: f32, shared: i32,
        shared_weight: f32, groups kept_groups: i32, routing: StepRoutingArgs, epilogue: ExpertEpilogueArgs,
    }
    StoredCoding {
        row_bits column_bits bits: i32, places plus: u32,
    }
    QuantPackStoredArgs {
        stored: In, q scales zeros found: Out,
        first count n k n_tiles k_packed group groups column stored_group rows_to_scale: i64,
        code zero: StoredCoding, scale_dtype: Dtype, format: QuantFormat, entries gate_up: i32,
    }
    QuantExpertsStreamArgs {
        x: In, w13 w2: QuantPack, topk_ids topk_weights expert_map: In, act slot_rows out flags: Out,
        flag_words tokens top_k num_ids: i32, output: Output, epilogue: ExpertEpilogueArgs,
    }
    QuantExpertsTensorArgs {
        x: In, w13 w2: QuantPack, slots counts: In, bucket: i32, act slot_rows counters: Out,
        tokens top_k num_ids invariant: i32, epilogue: ExpertEpilogueArgs,
    }
    QuantLinearTensorArgs {
        x: In, w: QuantPack, bias: In, out: Out, output: Output, m splits: i32,
    }
    OrderRowsArgs {
        x perm slots counts: In, bucket: i32, out: Out, tokens top_k columns experts: i32,
    }
    Fp8QuantiseArgs {
        x: In, q scales: Out, rows columns quads: i32,
    }
    Fp8PlacesArgs {
        x x_scales slots counts: In, bucket: i32, q scales: Out, tokens top_k columns experts: i32,
    }
    Fp8ExpertsArgs {
        q scales: In, w: QuantPack, slots counts: In, bucket: i32, out out_scales: Out, tokens top_k: i32,
    }
    Fp8LinearArgs {
        q scales: In, w: QuantPack, bias: In, out: Out, output: Output, m splits: i32,
    }
    AnyGroupSlotsArgs {
        topk_ids expert_map: In, count top_k num_ids num_local: i32, offsets slots in_rows workspace: Out,
    }
    AnyBatchRowsArgs {
        rows offsets slots: In, out counts: Out, dtype: Dtype,
        num_slots top_k experts max_tokens width: i32,
    }
    AnyRouteArgs {
        logits bias table token_ids given_ids given_weights valid: In,
        topk_ids topk_weights zero_weights: Out,
        tokens experts zero_experts top_k shared_slots vocab groups topk_group selection: i32,
        scoring: GateScoring, renormalize: i32, softcap scale shared_weight: f32,
        routing: StepRoutingArgs,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::STRUCTS;

    /// The Rust type for a C type.
    fn rust_type(c: &str) -> &str {
        match c {
            _ if c.ends_with('*') && c.starts_with("const ") => "In",
            _ if c.ends_with('*') => "Out",
            "int" => "i32",
            "float" => "f32",
            "int64_t" => "i64",
            "uint64_t" => "u64",
            "uint32_t" => "u32",
            "Scoring" => "GateScoring",
            other => other,
        }
    }

    /// The structs of a header: `struct Name { type field, field; .. };`.
    fn structs(header: &str) -> BTreeMap<String, Vec<(String, String)>> {
        let code: String = header.lines().map(|line| line.split("//").next().unwrap_or(line)).collect();
        let bodies = code.split("struct ").skip(1).map(|rest| rest.split_once("};").unwrap().0);
        let field = |statement: &str| {
            let (first, more) = statement.split_once(',').unwrap_or((statement, ""));
            let (ty, name) = first.trim().rsplit_once(' ').unwrap();
            let names = [name].into_iter().chain(more.split(',').map(str::trim).filter(|n| !n.is_empty()));
            names.map(|name| (name.to_string(), rust_type(ty).to_string())).collect::<Vec<_>>()
        };
        let parse = |body: &str| {
            let (name, fields) = body.split_once('{').unwrap();
            let statements = fields.split(';').filter(|s| !s.trim().is_empty());
            (name.trim().to_string(), statements.flat_map(field).collect())
        };
        bodies.map(parse).collect()
    }

    #[test]
    fn the_headers_declare_the_same_fields() {
        let cuda = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let mut declared = BTreeMap::new();
        for folder in std::fs::read_dir(cuda).unwrap() {
            let header = folder.unwrap().path().join("args.cuh");
            if let Ok(text) = std::fs::read_to_string(header) {
                declared.extend(structs(&text));
            }
        }
        let own: BTreeMap<_, Vec<_>> = STRUCTS
            .iter()
            .map(|(name, fields)| {
                let fields = fields.iter().map(|(field, ty)| ((*field).to_string(), (*ty).to_string()));
                ((*name).to_string(), fields.collect())
            })
            .collect();
        assert_eq!(own, declared);
    }
}
