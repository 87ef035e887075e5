//! Attention over keys and values that are in the cache: which kernel, its arguments, its launch.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use candle_core::{DType, Result, bail};

use super::gates::{gate_row, scale_by_gates};
use crate::buffer::Scratch;
use crate::cuda::args::{Dtype, In, Out, PagedAttentionArgs};
use crate::cuda::fp8::Fp8Place;
use crate::cuda::{CudaExec, aligned, ffi, small};
use crate::exec::Exec;
use crate::operands::AttentionMeta;
use crate::plan::{AttentionCall, AttentionForm, Form, PerHeadCall, PerHeadForm};
use crate::rows_view::RowsViewMut;
use crate::view::{View, ViewMut};

const OP: &str = "paged_attention";

/// What attention reads.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub q: View<'a>,
    pub k_cache: View<'a>,
    pub v_cache: View<'a>,
    pub meta: &'a AttentionMeta<'a>,
    /// The first row of the sequences: rows before it are another launch's.
    pub first: usize,
}

/// What a call launches.
pub(super) enum PagedLaunch<'a> {
    /// Attention. With [`AttentionForm::Wgmma`], `blocks` is the number of its blocks, which leave SMs to the next
    /// launch; 0: it uses all SMs.
    Attention { blocks: i32 },
    /// Attention and the product that follows it, if one launch computes both.
    Product { w_uv: View<'a>, values: ViewMut<'a> },
}

/// See [`crate::paged_attention_into`].
pub(crate) fn paged_attention(
    q: View,
    k_cache: View,
    v_cache: View,
    meta: &AttentionMeta,
    out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let inputs = Inputs { q, k_cache, v_cache, meta, first: 0 };
    attend(inputs, out.into(), PagedLaunch::Attention { blocks: 0 }, ex).map(drop)
}

/// Attention over latent rows and the product that follows it, `values` = `w_uv` times the latents, if the launch that
/// merges splits computes this product. Returns whether it does; `latents` are then unspecified.
pub(crate) fn latent_values(
    q: View,
    cache: View,
    meta: &AttentionMeta,
    latents: ViewMut,
    (w_uv, values): (View, ViewMut),
    ex: &Exec,
) -> Result<bool> {
    let inputs = Inputs { q, k_cache: cache, v_cache: cache, meta, first: 0 };
    attend(inputs, latents.into(), PagedLaunch::Product { w_uv, values }, ex)
}

/// Launches what is `asked`. Returns whether something was launched.
pub(super) fn attend(inputs: Inputs, mut out: RowsViewMut, asked: PagedLaunch, ex: &Exec) -> Result<bool> {
    let cuda = ex.cuda(OP)?;
    let rows = inputs.q.rows();
    let heads = inputs.q.dims()[1];
    let value_dim = out.columns() / heads.max(1);
    let call = inputs.call(value_dim, out.is_aligned(), cuda)?;
    let form = match inputs.q.dtype() {
        DType::BF16 => AttentionForm::choose(&call, &ex.machine()),
        _ => None,
    };
    let splits = inputs.splits(form, ex)?;
    if let PagedLaunch::Product { w_uv, .. } = &asked
        && !holds_product(*w_uv, rows, value_dim, splits, ex)
    {
        return Ok(false);
    }
    ex.launched(|| form.unwrap_or(AttentionForm::Any).name());
    let mut partials = match splits {
        2.. => Some(ex.scratch(DType::F32, &[rows * heads, splits as usize, value_dim + 2])?),
        _ => None,
    };
    let (to, fp8) = out.place(OP, cuda)?;
    if fp8.is_some() && form != Some(AttentionForm::Wgmma) {
        let fast = AttentionForm::Wgmma.name();
        bail!("{OP}: expected sizes of {fast}, which leaves rows in FP8, got {call:?}")
    }
    let (product, blocks) = match asked {
        PagedLaunch::Attention { blocks } => (None, blocks),
        PagedLaunch::Product { w_uv, mut values } => {
            (Some((cuda.read(OP, "w_uv", w_uv)?, cuda.write(OP, "values", &mut values)?)), 0)
        }
    };
    let holds_gates = form.is_some_and(|form| form.holds_gates(&call));
    let held = inputs.meta.gates.filter(|_| holds_gates);
    let mut args = inputs.arguments(form, (to, value_dim), (splits, partials.as_mut()), ex)?;
    args.gates = cuda.read_or_null(OP, "gates", held)?;
    args.gate_row = gate_row(OP, held)?;
    Launch { form, args, blocks, product, fp8 }.run(cuda)?;
    if let Some(gates) = inputs.meta.gates
        && !holds_gates
    {
        scale_by_gates(OP, gates, out, inputs.first, ex)?;
    }
    Ok(true)
}

/// Whether the launch that merges splits holds the product with `w_uv`, too.
fn holds_product(w_uv: View, rows: usize, latent: usize, splits: i32, ex: &Exec) -> bool {
    let call = PerHeadCall {
        rows,
        head_dim: w_uv.dims()[1],
        latent,
        neighbour: (splits > 1).then_some("latent_merge"),
        dtype: w_uv.dtype(),
    };
    aligned(&[w_uv]) && PerHeadForm::choose(&call, &ex.machine()) == Some(PerHeadForm::Overlapped)
}

impl Inputs<'_> {
    /// What the choice of the kernel depends on.
    fn call(&self, value_dim: usize, out_aligned: bool, cuda: &CudaExec) -> Result<AttentionCall> {
        let Self { q, k_cache, v_cache, meta, .. } = *self;
        let keys: *const c_void = cuda.read(OP, "k_cache", k_cache)?;
        let one_cache = keys == cuda.read(OP, "v_cache", v_cache)?;
        let rows = q.rows();
        let head_dim = q.dims()[2];
        let latent = k_cache.dims()[1] == 1 && one_cache && value_dim < head_dim;
        Ok(AttentionCall {
            rows,
            // Holds for a step of decoding rows, padding included. Other steps with no more rows than sequences are
            // computed as well.
            one_row_each: latent && rows <= meta.block_tables.rows(),
            num_heads: q.dims()[1],
            head_dim,
            // No fast kernel takes values in longer rows of a cache of their own, and none takes a value_dim of 0.
            value_dim: if v_cache.dims()[3] == value_dim || one_cache { value_dim } else { 0 },
            latent,
            sinks: meta.sinks.is_some(),
            gates: meta.gates.is_some(),
            dtype: k_cache.dtype(),
            block_size: Some(k_cache.dims()[2]),
            aligned: aligned(&[q, k_cache, v_cache])
                && meta.gates.is_none_or(|g| aligned(&[g]))
                && out_aligned,
        })
    }

    /// The number of parts of the positions; 1 if the form has no parts.
    fn splits(&self, form: Option<AttentionForm>, ex: &Exec) -> Result<i32> {
        let sequences = small(OP, self.meta.block_tables.rows())?;
        let rows = small(OP, self.q.rows())?;
        let heads = small(OP, self.q.dims()[1])?;
        let sms = small(OP, ex.cuda(OP)?.gpu.sms)?;
        Ok(match form {
            // SAFETY: a pure function of numbers.
            Some(AttentionForm::LatentDecode) => unsafe {
                ffi::moe_attention_latent_decode_splits(sequences, sms)
            },
            // SAFETY: a pure function of numbers.
            Some(AttentionForm::Latent) if !ex.batch_invariant() => unsafe {
                ffi::moe_attention_latent_splits(rows, sequences, heads, sms)
            },
            _ => 1,
        })
    }

    /// The arguments that the kernels share.
    fn arguments(
        &self,
        form: Option<AttentionForm>,
        (out, value_dim): (Out, usize),
        (splits, partials): (i32, Option<&mut Scratch>),
        ex: &Exec,
    ) -> Result<PagedAttentionArgs> {
        let cuda = ex.cuda(OP)?;
        let Self { q, k_cache, v_cache, meta, .. } = *self;
        let tables = meta.block_tables.dims();
        let cache = k_cache.dims();
        Ok(PagedAttentionArgs {
            q: cuda.read(OP, "q", q)?,
            k_cache: cuda.read(OP, "k_cache", k_cache)?,
            v_cache: cuda.read(OP, "v_cache", v_cache)?,
            query_start_loc: cuda.read(OP, "query_start_loc", meta.query_start_loc)?,
            positions: cuda.read(OP, "positions", meta.positions)?,
            block_tables: cuda.read(OP, "block_tables", meta.block_tables)?,
            out,
            dtype: Dtype::of(OP, k_cache.dtype())?,
            q_dtype: Dtype::of(OP, q.dtype())?,
            tokens: small(OP, q.rows())?,
            sequences: small(OP, tables[0])?,
            max_blocks: small(OP, tables[1])?,
            heads: small(OP, q.dims()[1])?,
            kv_heads: small(OP, cache[1])?,
            head_dim: small(OP, q.dims()[2])?,
            value_dim: small(OP, value_dim)?,
            value_row: small(OP, v_cache.dims()[3])?,
            num_blocks: small(OP, cache[0])?,
            block_size: small(OP, cache[2])?,
            scale: meta.scale,
            window: meta.window_i32(),
            invariant: i32::from(ex.batch_invariant()),
            counters: match form {
                Some(AttentionForm::Wgmma) => cuda.counters("attention_prefill_wgmma", 2)?,
                Some(AttentionForm::Latent) => cuda.counters("attention_latent", 2)?,
                _ => null_mut(),
            },
            partials: cuda.write_or_null(OP, "partials", partials.map(|p| p.view_mut()).as_mut())?,
            splits,
            sinks: cuda.read_or_null(OP, "sinks", meta.sinks)?,
            gates: null(),
            gate_row: 0,
        })
    }
}

/// A launch of the kernel of a form, or without a form of the kernel for any sizes.
struct Launch {
    form: Option<AttentionForm>,
    args: PagedAttentionArgs,
    /// See [`PagedLaunch::Attention`].
    blocks: i32,
    /// w_uv and the address of its values, if the launch also computes this product.
    product: Option<(In, Out)>,
    /// Scales and order of `out`, if it is in FP8.
    fp8: Option<Fp8Place>,
}

impl Launch {
    fn run(&self, cuda: &CudaExec) -> Result<()> {
        let args = &raw const self.args;
        let blocks = self.blocks;
        let stream = cuda.raw()?;
        // SAFETY: the op has checked dims and dtypes. The form has checked the conditions of the fast launchers and of
        // the product. Rows in FP8 have the sizes of `out`, and any number of blocks is right. Which rows, positions
        // and blocks the fast kernels follow is the contract of `AttentionMeta`; the other kernel does not read beyond
        // tables and cache.
        let code = unsafe {
            match (self.form, self.product, &self.fp8) {
                (Some(AttentionForm::LatentDecode), product, _) => {
                    let (w_uv, values) = product.unwrap_or((null(), null_mut()));
                    ffi::moe_attention_latent_decode(args, w_uv, values, stream)
                }
                // Of the other forms, only this one has several splits.
                (_, Some((w_uv, values)), _) => ffi::moe_attention_latent_values(args, w_uv, values, stream),
                (Some(AttentionForm::Wgmma), _, Some(to)) => {
                    ffi::moe_attention_prefill_wgmma_fp8(args, blocks, to.scales, to.lines, to.quads, stream)
                }
                (Some(AttentionForm::Wgmma), ..) => {
                    ffi::moe_attention_prefill_wgmma_on_blocks(args, blocks, stream)
                }
                (Some(AttentionForm::Latent), ..) => ffi::moe_attention_latent(args, stream),
                (Some(AttentionForm::Prefill), ..) => ffi::moe_attention_prefill(args, stream),
                _ => ffi::moe_any_attention(args, stream),
            }
        };
        cuda.check(OP, code)
    }
}
