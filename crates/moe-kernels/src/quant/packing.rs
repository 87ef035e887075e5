//! Packing: rows from a reader to panels, sixteen at a time and in parallel.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, bail};
use rayon::prelude::*;

use super::matrix::{Part, QuantMatrix, QuantUse, check_matrices, panels};
use super::packed::{Packed, ScaleCounts, Scales};
use super::places::{put_step, step_bytes};
use super::scale_lines::{Buffer, Lines, RowScales};
use super::{Columns, LogicalRows, QuantRows, STEP};
use crate::cpu::simd::LANES;
use crate::element::Float;
use crate::exec::Exec;
use crate::scheme::{Codes, Levels, QuantScheme};

impl QuantMatrix {
    /// Packs matrices of one shape and scheme: a dense weight is one, experts are many. Reads each row once, a panel at
    /// a time, on the threads of `ex` (and once more if the scales turn out not to be f16 after some have been read).
    ///
    /// # Errors
    /// No matrix; different shapes or schemes; weights that are not quantised; segments that do not divide K; an odd
    /// number of rows for gate and up; rows that a reader hands over wrong (sizes, integers beyond their bits, FP8
    /// NaN); what a reader reports.
    pub fn pack(matrices: &[&dyn QuantRows], usage: QuantUse, ex: &Exec) -> Result<Self> {
        let width = matrices.first().map_or(0, |m| m.shape().1);
        Self::pack_inputs(matrices, 0..width, usage, ex)
    }

    /// The part of [`pack`](Self::pack) that multiplies `inputs` of x: what a rank holds of a row-parallel product
    /// whose groups are spread over all inputs, as act-order spreads them. It keeps all scales.
    ///
    /// # Errors
    /// As `pack`, with K = `inputs.len()`; inputs that there are not.
    pub fn pack_inputs(
        matrices: &[&dyn QuantRows],
        inputs: Range<usize>,
        usage: QuantUse,
        ex: &Exec,
    ) -> Result<Self> {
        let ((n, width), scheme) = check_matrices(matrices, usage)?;
        let k = inputs.len();
        let segments = if let QuantUse::RowParallel { segments } = usage { segments } else { 1 };
        let mut parts: Vec<Part> = Vec::with_capacity(matrices.len());
        let mut first = 0;
        for m in matrices {
            let columns = Columns::new(width, inputs.clone(), scheme.group_size(width), segments, m.perm())?;
            let same = parts.last().filter(|last| *last.columns == columns);
            let columns = same.map_or_else(|| Arc::new(columns), |last| Arc::clone(&last.columns));
            let bytes = columns.steps() * step_bytes(scheme) * panels(n, usage);
            parts.push(Part { columns, first });
            first += bytes;
        }
        let mut matrix = Self {
            dims: [matrices.len(), n, k],
            width,
            scheme,
            usage,
            parts,
            scale_counts: ScaleCounts::new(scheme, width),
            packed: Packed::default(),
        };
        matrix.packed = pack(&matrix, matrices, first, ex)?;
        Ok(matrix)
    }
}

/// Packs the matrices, whose integers take `bytes`.
fn pack(to: &QuantMatrix, matrices: &[&dyn QuantRows], bytes: usize, ex: &Exec) -> Result<Packed> {
    ex.install(|| {
        if let Some(packed) = pack_as(to, matrices, bytes, Scales::F16)? {
            return Ok(packed);
        }
        match pack_as(to, matrices, bytes, Scales::F32)? {
            Some(packed) => Ok(packed),
            None => bail!("scales do not fit f32"),
        }
    })
}

/// Packs with scales and minima of a type; `None` if it does not hold one of them.
fn pack_as<C: Float>(
    to: &QuantMatrix,
    matrices: &[&dyn QuantRows],
    bytes: usize,
    held: fn(Vec<C>) -> Scales,
) -> Result<Option<Packed>> {
    let panels = to.panels();
    let scale_counts = to.scale_counts;
    let all = matrices.len() * panels;
    let mut q = vec![0; bytes];
    let mut scales = Buffer::<C>::new(to.scheme, all, scale_counts);
    let mut zeros = vec![0; if to.scheme.has_zero_points() { all * scale_counts.groups } else { 0 }];
    let mut minima = Buffer::<C>::new(to.scheme, if to.scheme.has_minima() { all } else { 0 }, scale_counts);
    let exact = AtomicBool::new(true);
    let mut rest = &mut q[..];
    let mut places = Vec::new();
    let mut scale_lines = scales.panels(scale_counts);
    let mut zero_chunks = zeros.chunks_mut(scale_counts.groups.max(1));
    let mut minimum_lines = minima.panels(scale_counts);
    for e in 0..matrices.len() {
        let len = to.parts[e].columns.steps() * to.step_bytes();
        for panel in 0..panels {
            let (q, tail) = rest.split_at_mut(len);
            rest = tail;
            let scales = scale_lines.next();
            let zeros = zero_chunks.next().unwrap_or_default();
            let minima = minimum_lines.next();
            places.push(Panel { e, panel, q, scales, zeros, minima });
        }
    }
    places.into_par_iter().try_for_each_init(LogicalRows::default, |rows, place| -> Result<()> {
        if exact.load(Ordering::Relaxed) && !place.fill(to, matrices, rows)? {
            exact.store(false, Ordering::Relaxed);
        }
        Ok(())
    })?;
    let is_exact = exact.into_inner();
    Ok(is_exact.then(|| Packed {
        q,
        scales: scales.held(to.scheme, held),
        zeros,
        minima: minima.held(to.scheme, held),
    }))
}

/// A panel that is being packed.
struct Panel<'a, C> {
    e: usize,
    panel: usize,
    q: &'a mut [u8],
    scales: Lines<'a, C>,
    zeros: &'a mut [u8],
    minima: Lines<'a, C>,
}

impl<C: Float> Panel<'_, C> {
    /// Reads and packs the panel's rows; whether C holds all their scales. Rows that are missing stay zero.
    fn fill(mut self, to: &QuantMatrix, matrices: &[&dyn QuantRows], rows: &mut LogicalRows) -> Result<bool> {
        let range = to.rows(self.panel);
        let k = to.width;
        let groups = to.groups();
        let count = range.len();
        matrices[self.e].read(range.clone(), rows)?;
        check_rows(to.scheme, to.width, rows, count)
            .map_err(|e| e.context(format!("rows {range:?} of matrix {}", self.e)))?;
        let columns = &to.parts[self.e].columns;
        for lane in 0..count {
            let row = &rows.q[lane * k..(lane + 1) * k];
            for block in &columns.blocks {
                for (step, first) in (0..block.len).step_by(STEP).enumerate() {
                    let here = block.start + first..block.start + block.len.min(first + STEP);
                    let mut codes = [0; STEP];
                    match &columns.logical {
                        Some(order) => {
                            let of = |column: &u32| row[*column as usize];
                            codes.iter_mut().zip(&order[here]).for_each(|(code, column)| *code = of(column));
                        }
                        None => codes.iter_mut().zip(&row[here]).for_each(|(code, q)| *code = *q),
                    }
                    put_step(to.scheme, self.q, block.step + step, lane, &codes);
                }
            }
            for (group, zero) in rows.zero.iter().skip(lane * groups).take(groups).enumerate() {
                if let Some(at) = self.zeros.get_mut(group * LANES + lane) {
                    *at = *zero;
                }
            }
            let scales = RowScales { floats: &rows.scale, levels: &rows.scale_levels, lane, count };
            let minima = RowScales { floats: &rows.minimum, levels: &rows.minimum_levels, lane, count };
            if !(self.scales.put(&scales) && self.minima.put(&minima)) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Refuses rows whose sizes or values do not fit the scheme.
pub(super) fn check_rows(scheme: QuantScheme, width: usize, rows: &LogicalRows, count: usize) -> Result<()> {
    let values = count * width;
    let groups = count * scheme.groups(width);
    let has_zeros = scheme.is_int() && !scheme.has_minima();
    let minima = if scheme.has_minima() { groups } else { 0 };
    if rows.q.len() != values
        || rows.scale.len() != groups
        || (has_zeros && rows.zero.len() != groups)
        || rows.minimum.len() != minima
    {
        bail!(
            "expected {values} weights, {groups} scales, of integers without minima as many zero points, and {minima} minima; got \
             {}, {}, {} and {}",
            rows.q.len(),
            rows.scale.len(),
            rows.zero.len(),
            rows.minimum.len()
        )
    }
    check_levels(scheme, rows, count, width)?;
    let most = scheme.largest_code();
    // Without an early end, so that it takes vectors at a time.
    if rows.q.iter().fold(0, |all, q| all | q) > most {
        let q = rows.q.iter().find(|q| **q > most).unwrap_or(&0);
        bail!("integer {q} does not fit {} bits", scheme.bits())
    }
    let is_wrong = |zero: &u8| *zero > most || (!scheme.has_zero_points() && *zero != scheme.middle());
    if let Some(zero) = rows.zero.iter().find(|zero| has_zeros && is_wrong(zero)) {
        bail!("zero point {zero} is not one of {scheme}")
    }
    if scheme.codes == Codes::E4m3 && rows.q.iter().fold(false, |nan, q| nan | (q & 0x7f == 0x7f)) {
        bail!("an FP8 weight is NaN")
    }
    Ok(())
}

/// Refuses levels of scales whose numbers do not fit the scheme.
fn check_levels(scheme: QuantScheme, rows: &LogicalRows, count: usize, width: usize) -> Result<()> {
    let shared = count * scheme.shared_scales(width);
    let factors = if shared > 0 { count * scheme.groups(width) } else { 0 };
    let expected = [[factors, shared], if scheme.has_minima() { [factors, shared] } else { [0, 0] }];
    let got =
        [&rows.scale_levels, &rows.minimum_levels].map(|levels| [levels.factor.len(), levels.shared.len()]);
    if got != expected {
        bail!("expected {expected:?} factors and shared numbers, of scales and of minima; got {got:?}")
    }
    let mut factors = rows.scale_levels.factor.iter().chain(&rows.minimum_levels.factor);
    if scheme.levels == Levels::Fp8 && factors.any(|factor| factor & 0x7f == 0x7f) {
        bail!("an FP8 scale is NaN")
    }
    Ok(())
}
