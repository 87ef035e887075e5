//! Quantised packs on a device: how they get there, and the products of any scheme, dtype and shape.

mod arrays;
mod rows;
mod stored;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use self::arrays::{Arrays, upload};
use super::any::activation_code;
use super::args::{
    AnyQuantDownArgs, AnyQuantGateUpArgs, AnyQuantLinearArgs, Dtype, In, OrderRowsArgs, QuantPack,
};
use super::quant_format::QuantFormat;
use super::{CudaExec, Staging, aligned, ffi, small};
use crate::buffer::{Buffer, Scratch};
use crate::exec::Exec;
use crate::operands::ExpertGroups;
use crate::plan::{DequantiseCall, DequantiseForm, Form, QuantWeights};
use crate::quant::{
    ACT_ORDER, QuantPacking, QuantRows, QuantUse, StoredBatches, TILE_ROWS, Tiles, check_matrices,
};
use crate::scheme::QuantScheme;
use crate::tags::Activation;
use crate::view::{View, ViewMut};

/// Bytes of a staging buffer where the checkpoint brings no buffers.
const STAGE_BYTES: usize = 4 << 20;
/// Why the host packs a matrix that the device had begun to pack.
const WRONG_VALUES: &str = "the device found values that the format does not have";

/// Matrices [E, N, K] of one scheme in fragment order on a device: about as many bytes as in the checkpoint.
#[derive(Debug)]
pub(crate) struct DevicePack {
    tiles: Tiles,
    device: Device,
    usage: QuantUse,
    q: Buffer,
    scales: Buffer,
    scale_rows: usize,
    in_blocks: bool,
    zeros: Option<Buffer>,
    perm: Option<Buffer>,
    packing: QuantPacking,
}

impl DevicePack {
    /// Packs matrices of one shape and scheme, whose products take `inputs` of x. If [`StoredBatches::choose`] allows
    /// it, the device packs them from the bytes of the file, otherwise the host does.
    ///
    /// # Errors
    /// The errors of [`QuantMatrix::pack_inputs`](crate::quant::QuantMatrix::pack_inputs); no device memory left.
    pub(crate) fn pack(
        matrices: &[&dyn QuantRows],
        inputs: &Range<usize>,
        usage: QuantUse,
        staging: Option<Arc<Staging>>,
        ex: &Exec,
    ) -> Result<Self> {
        let (_, scheme) = check_matrices(matrices, usage)?;
        QuantFormat::of("a quantised pack", scheme)?;
        let tiles = Tiles::new(matrices, inputs, usage == QuantUse::GateUp)?;
        let bytes = matrices.len() * tiles.n_tiles() * tiles.row_bytes();
        let staging = match staging {
            Some(staging) => staging,
            None => {
                let count = (2 * rayon::current_num_threads()).min(bytes.div_ceil(STAGE_BYTES));
                Arc::new(Staging::new(count, STAGE_BYTES.max(tiles.row_bytes()), ex)?)
            }
        };
        let (arrays, packing) = match StoredBatches::choose(matrices, &tiles, staging.buffer_len()) {
            Ok(batches) => match stored::pack(&tiles, &batches, &staging, ex)? {
                Some(arrays) => (arrays, QuantPacking::Device),
                // The host reads the rows again. Its error says where the wrong values are.
                None => (
                    rows::pack(&tiles, matrices, &staging, ex)?,
                    QuantPacking::Host(WRONG_VALUES.to_string()),
                ),
            },
            Err(why) => (rows::pack(&tiles, matrices, &staging, ex)?, QuantPacking::Host(why)),
        };
        let perm = tiles.perm().map(|perm| upload(&perm, ex)).transpose()?;
        let Arrays { q, scales, scale_rows, in_blocks, zeros } = arrays;
        let device = ex.device().clone();
        Ok(Self { tiles, device, usage, q, scales, scale_rows, in_blocks, zeros, perm, packing })
    }

    /// Who packed it.
    pub(crate) fn packing(&self) -> &QuantPacking {
        &self.packing
    }

    /// E, N and K.
    pub(crate) fn dims(&self) -> [usize; 3] {
        self.tiles.dims
    }

    /// How the matrices are quantised.
    pub(crate) fn scheme(&self) -> QuantScheme {
        self.tiles.scheme
    }

    /// The properties of the pack on which the choice of kernels depends.
    pub(crate) fn weights(&self) -> QuantWeights {
        let Tiles { scheme, gate_up, .. } = self.tiles;
        let in_blocks = self.in_blocks;
        let order = self.tiles.order();
        QuantWeights { scheme, scales: self.scales.dtype(), gate_up, in_blocks, order }
    }

    /// The use for which the matrices are packed.
    pub(crate) fn usage(&self) -> QuantUse {
        self.usage
    }

    /// The device on which the matrices are.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of integers, scales, zero points and orders.
    pub(crate) fn bytes(&self) -> usize {
        let of = |buffer: &Buffer| buffer.view().elem_count() * buffer.dtype().size_in_bytes();
        of(&self.q)
            + of(&self.scales)
            + [&self.zeros, &self.perm].into_iter().flatten().map(of).sum::<usize>()
    }

    /// Bytes of one matrix: its integers, scales and zero points.
    ///
    /// # Errors
    /// Matrices with act-order: each has its own order of columns, so none can take another one's place.
    pub(crate) fn expert_len(&self) -> Result<usize> {
        if self.perm.is_some() {
            bail!("an expert's weights: {ACT_ORDER}")
        }
        // A pack without matrices has no bytes.
        Ok(self.bytes().checked_div(self.tiles.dims[0]).unwrap_or(0))
    }

    /// The pieces of matrix `expert`, as [`expert_len`](Self::expert_len) counts them.
    pub(crate) fn expert_pieces(&self, expert: usize) -> Result<Vec<View<'_>>> {
        let experts = self.tiles.dims[0].max(1);
        let pieces = self.arrays().into_iter().map(|all| {
            let len = all.elem_count() / experts;
            all.narrow(expert * len, len)
        });
        pieces.collect()
    }

    /// Integers, scales and zero points of all matrices, one dimension each.
    pub(crate) fn arrays(&self) -> Vec<View<'_>> {
        let all = [Some(&self.q), Some(&self.scales), self.zeros.as_ref()];
        all.into_iter().flatten().map(Buffer::view).collect()
    }

    /// A pack of `experts` matrices in the order of this pack, from arrays as [`arrays`](Self::arrays) returns them.
    ///
    /// # Errors
    /// Arrays of other dtypes or sizes; matrices with act-order.
    pub(crate) fn of_arrays(&self, arrays: Vec<Buffer>, experts: usize) -> Result<Self> {
        self.expert_len()?;
        let mut tiles = self.tiles.clone();
        tiles.dims[0] = experts;
        let Self { device, usage, scale_rows, in_blocks, .. } = self;
        let mut arrays = arrays.into_iter();
        let (Some(q), Some(scales), zeros, None) =
            (arrays.next(), arrays.next(), arrays.next(), arrays.next())
        else {
            bail!("an expert's weights: expected integers, scales and zero points")
        };
        let device = device.clone();
        let usage = *usage;
        let scale_rows = *scale_rows;
        let packing = self.packing.clone();
        Ok(Self {
            tiles,
            device,
            usage,
            q,
            scales,
            scale_rows,
            in_blocks: *in_blocks,
            zeros,
            perm: None,
            packing,
        })
    }

    /// The form in which the scales are stored. Two packs may have different forms if their values differ.
    pub(crate) fn scale_form(&self) -> String {
        format!("scales of {} for {} of {TILE_ROWS} rows", self.scales.dtype().as_str(), self.scale_rows)
    }

    /// The pack as launchers take it.
    pub(crate) fn args(&self, op: &str, cuda: &CudaExec) -> Result<QuantPack> {
        let tiles = &self.tiles;
        let [experts, n, k] = self.tiles.dims;
        let size = |n: usize| small(op, n).map(i64::from);
        let view = |buffer: &Option<Buffer>| -> Result<In> {
            cuda.read_or_null(op, "a quantised pack", buffer.as_ref().map(Buffer::view))
        };
        Ok(QuantPack {
            q: cuda.read(op, "a quantised pack", self.q.view())?,
            scales: cuda.read(op, "scales", self.scales.view())?,
            zeros: view(&self.zeros)?,
            perm: view(&self.perm)?,
            experts: size(experts)?,
            n: size(n)?,
            k: size(k)?,
            n_tiles: size(tiles.n_tiles())?,
            k_packed: size(tiles.k_packed)?,
            group: size(tiles.group)?,
            groups: size(tiles.groups)?,
            format: QuantFormat::of(op, tiles.scheme)?,
            scale_dtype: self.scale_dtype(op)?,
            scale_rows: small(op, self.scale_rows)?,
            gate_up: i32::from(tiles.gate_up),
        })
    }

    /// The dtype of scales, or of the factors of rows where the scales are bytes.
    fn scale_dtype(&self, op: &str) -> Result<Dtype> {
        match self.scales.dtype() {
            DType::U8 => Ok(Dtype::F32),
            dtype => Dtype::of(op, dtype),
        }
    }

    /// [`args`](Self::args) for rows of x that are already in the order of the pack's columns, so that kernels reorder
    /// nothing.
    pub(crate) fn args_in_pack_order(&self, op: &str, cuda: &CudaExec) -> Result<QuantPack> {
        Ok(QuantPack { perm: std::ptr::null(), ..self.args(op, cuda)? })
    }

    /// The matrices as floats, [E, N, K] of `dtype`.
    ///
    /// # Errors
    /// No memory left.
    pub(crate) fn to_tensor(&self, dtype: DType) -> Result<Tensor> {
        let mut out = Buffer::unspecified_on(&self.device, dtype, &self.tiles.dims)?;
        self.dequantise_into("dequantise", out.view_mut(), &Exec::on(&self.device)?)?;
        out.into_tensor()
    }

    /// Writes the matrices as floats to `out`, [E, N, K] or, for one matrix, [N, K].
    pub(crate) fn dequantise_into(&self, op: &str, out: ViewMut, ex: &Exec) -> Result<()> {
        self.write_floats(op, (self.args(op, ex.cuda(op)?)?, self.weights()), out, ex)
    }

    /// [`dequantise_into`](Self::dequantise_into) with the columns in the order of the pack.
    pub(crate) fn dequantise_in_pack_order(&self, op: &str, out: ViewMut, ex: &Exec) -> Result<()> {
        let pack = self.args_in_pack_order(op, ex.cuda(op)?)?;
        self.write_floats(op, (pack, self.weights().in_pack_order()), out, ex)
    }

    fn write_floats(
        &self,
        op: &str,
        (pack, quant): (QuantPack, QuantWeights),
        mut out: ViewMut,
        ex: &Exec,
    ) -> Result<()> {
        let cuda = ex.cuda(op)?;
        let size = self.tiles.dims.iter().product::<usize>();
        if out.elem_count() != size {
            bail!("{op}: expected {size} places for a pack {:?}, got {:?}", self.tiles.dims, out.dims())
        }
        let code = Dtype::of(op, out.dtype())?;
        let [_, n, k] = self.tiles.dims;
        let dtype = out.dtype();
        let aligned = aligned(&[out.as_view()]);
        let call = DequantiseCall { n, k, quant, dtype, aligned };
        let form = DequantiseForm::choose(&call, &ex.machine());
        let to = cuda.write(op, "out", &mut out)?;
        // SAFETY: the pack has the order that the launchers read, and `out` has room for all floats; the form has
        // checked the conditions of the fast launcher.
        cuda.check(op, unsafe {
            match form {
                Some(DequantiseForm::Fast) => ffi::moe_quant_dequantise(&pack, to, cuda.raw()?),
                _ => ffi::moe_any_dequantise(&pack, to, code, cuda.raw()?),
            }
        })
    }
}

/// Rows of x, [T, K] bf16, in the order of the columns of `w`, one matrix whose columns are sorted.
pub(crate) fn ordered(op: &str, x: View, w: &DevicePack, ex: &Exec) -> Result<Scratch> {
    let cuda = ex.cuda(op)?;
    let [_, _, k] = w.dims();
    let mut out = ex.scratch(DType::BF16, &[x.rows(), k])?;
    let args = OrderRowsArgs {
        x: cuda.read(op, "x", x)?,
        perm: w.args(op, cuda)?.perm,
        slots: std::ptr::null(),
        counts: std::ptr::null(),
        bucket: 0,
        out: cuda.write(op, "ordered rows", &mut out.view_mut())?,
        tokens: small(op, x.rows())?,
        top_k: 1,
        columns: small(op, k)?,
        experts: 1,
    };
    // SAFETY: the pack's order names a column of x for each column of the pack, `out` has room for all rows, and the
    // form has checked dtype and alignment.
    cuda.check("order_rows", unsafe { ffi::moe_order_rows(&args, cuda.raw()?) })?;
    Ok(out)
}

/// out = x · wᵀ + bias; the op has checked dims and dtypes.
pub(crate) fn linear(
    op: &str,
    x: View,
    w: &DevicePack,
    bias: Option<View>,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let args = AnyQuantLinearArgs {
        x: cuda.read(op, "x", x)?,
        w: w.args(op, cuda)?,
        bias: cuda.read_or_null(op, "bias", bias)?,
        dtype: Dtype::of(op, x.dtype())?,
        out_dtype: Dtype::of(op, out.dtype())?,
        rows: small(op, x.rows())?,
        out: cuda.write(op, "out", &mut out)?,
    };
    // SAFETY: dims and dtypes are checked by the op, the pack is in the launcher's order.
    cuda.check(op, unsafe { ffi::moe_any_quant_linear(&args, cuda.raw()?) })
}

/// See [`crate::grouped_gate_up_into`]; the op has checked dims and dtypes.
pub(crate) fn gate_up(
    op: &str,
    x: View,
    groups: &ExpertGroups,
    (w13, bias): (&DevicePack, Option<View>),
    activation: Activation,
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let (activation, alpha, limit) = activation_code(op, activation)?;
    let args = AnyQuantGateUpArgs {
        x: cuda.read(op, "x", x)?,
        offsets: cuda.read(op, "offsets", groups.offsets)?,
        in_rows: cuda.read(op, "in_rows", groups.in_rows)?,
        w13: w13.args(op, cuda)?,
        bias: cuda.read_or_null(op, "w13_bias", bias)?,
        out: cuda.write(op, "out", &mut out)?,
        dtype: Dtype::of(op, x.dtype())?,
        activation,
        alpha,
        limit,
        x_rows: small(op, x.rows())?,
        rows: small(op, groups.in_rows.elem_count())?,
    };
    // SAFETY: as in `linear`; rows beyond x read nothing, and offsets beyond the rows are cut.
    cuda.check(op, unsafe { ffi::moe_any_quant_gate_up(&args, cuda.raw()?) })
}

/// See [`crate::grouped_down_into`]; the op has checked dims and dtypes.
pub(crate) fn down(
    op: &str,
    x: View,
    groups: &ExpertGroups,
    (w2, bias): (&DevicePack, Option<View>),
    mut out: ViewMut,
    ex: &Exec,
) -> Result<()> {
    let cuda = ex.cuda(op)?;
    let args = AnyQuantDownArgs {
        x: cuda.read(op, "x", x)?,
        offsets: cuda.read(op, "offsets", groups.offsets)?,
        out_rows: cuda.read(op, "out_rows", groups.out_rows)?,
        w2: w2.args(op, cuda)?,
        bias: cuda.read_or_null(op, "w2_bias", bias)?,
        dtype: Dtype::of(op, x.dtype())?,
        rows: small(op, x.rows())?,
        num_out: small(op, out.rows())?,
        out: cuda.write(op, "out", &mut out)?,
    };
    // SAFETY: as in `linear`; rows beyond out are not written.
    cuda.check(op, unsafe { ffi::moe_any_quant_down(&args, cuda.raw()?) })
}
