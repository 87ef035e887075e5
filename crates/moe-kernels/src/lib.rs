//! Kernels, views and workspaces of the Mixture-of-Experts crates.
#![doc = include_str!("../README.md")]

mod align;
pub mod arguments;
mod buffer;
mod checksum;
mod codes;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dispatched;
mod element;
mod error;
mod exec;
mod fp8;
pub mod gradient;
mod memory;
mod monolithic;
pub mod names;
mod operands;
mod ops;
mod philox;
pub mod plan;
mod product_rows;
pub mod quant;
mod residency;
mod roof;
mod routed;
mod rows_view;
mod scheme;
mod spec;
mod step_routing;
mod storage;
mod tags;
mod tensor;
mod unread;
mod view;
mod weight;

pub use align::{
    AlignedSizes, AlignedTokens, Log2Phy, MAX_ALIGN_BLOCK, PHYSICAL_IDS, RowBatches, Spread,
    align_tokens_into, batch_rows_into, contiguous_local_ids_into, copy_rows_into, fill_into,
    group_slots_into, group_token_slots_into, list_slots_into, mask_nonlocal_into, max_aligned_sizes,
    number_rows_into, physical_ids_into, scale_rows_into, unbatch_rows_into, zero_absent_into,
};
pub use buffer::{Buffer, Scratch, Workspace};
pub use checksum::{checksum, checksum_of_sum, word_sum_into};
pub use dispatched::{Dispatched, Lent, SlotRouting, SlotRows};
pub use element::Float;
pub use error::{ArgumentError, cause, into_candle};
pub use exec::{CpuIsa, Exec, LaunchLog, Launched, LaunchedAsOne, gpu_of};
pub use fp8::{FP8_GROUP, Fp8Order, quantised_to_fp8};
pub use memory::HugePages;
pub use monolithic::{Gate, GateGroups, PreNorm, SublayerIo};
pub use operands::{
    AttentionMeta, CausalConv, DeltaHeads, ExpertGroups, GatedDelta, GatedRmsNorm, HeadsNorm, MlaLatent,
    MlaPrompt, MlaQuery, MlaRows, QkNormRope, QkvHeads, StateArrays, StateRows, StepRows,
};
pub use ops::{
    ATTENTION_BLOCK, Segment, add_into, add_rms_norm_into, add_scaled_into, causal_conv_into,
    copy_states_into, embedding_into, gated_activation_into, gated_delta_into, gated_rms_norm_into,
    gated_rows_into, grouped_down_into, grouped_down_segment_into, grouped_gate_up_into, head_squares_into,
    heads_norm_into, linear_add_into, linear_into, linear_row_parallel_into, linear_segment_into,
    mla_attention_into, mla_cache_into, mla_latent_into, mla_prompt_into, mla_query_into, mla_rows_into,
    mla_value_into, norm_linear_into, one_group_into, paged_attention_into, qk_norm_rope_cache_into,
    rms_norm_into, rope_attention_into, row_parallel_segments, sigmoid_gate_into, sigmoid_into, softmax_into,
    weighted_sum_into,
};
pub use philox::Philox4x32;
pub use plan::{check_kernel_image, is_portable_only};
pub use product_rows::ProductRows;
pub use residency::{Exchange, ExpertTraffic, Pass, Place, Residency, max_passes};
pub use roof::Roof;
pub use routed::{ExpertHeat, NO_EXPERT, RoutedExperts, StepContext};
pub use rows_view::{Fp8Rows, RowsView, RowsViewMut};
pub use scheme::{Codes, Levels, Offset, QuantGroup, QuantScheme};
pub use spec::ExpertsSpec;
pub use step_routing::{DeviceRouting, ForcedWeights, LayerRouting};
pub use storage::Element;
pub use tags::{Activation, ActivationFormat, GateScoring, RoutingMethod, WeightAndReduce};
pub use tensor::{TensorView, forward_rows, with_tensors, with_views};
pub use unread::Unread;
pub use view::{Dims, MAX_RANK, View, ViewMut};
pub use weight::{PanelsView, QuantView, Weight, WeightGuard, WeightOrder, WeightView};

pub use candle_core as candle;
pub use half;
