//! The tile registers: configuration, loads, products, stores.
//!
//! The standard library has no stable AMX intrinsics, hence the assembly. The registers hold their
//! values from one block of assembly to the next: nothing else in the program uses them, and
//! [`configure`] and [`release`] enclose every use.

use std::arch::asm;
use std::sync::OnceLock;

use crate::cpu::simd::LANES;
use crate::cpu::tile::UNIT;

/// Values of k that one tile instruction covers.
pub(super) const STEP: usize = 32;

/// Words of a packed row of x per step.
pub(super) const STEP_WORDS: usize = STEP / 2;

/// Whether the processor has AMX for bf16 and the system lets this process use it.
pub(crate) fn is_supported() -> bool {
    const AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| has(AMX_BF16_AND_TILE) && request_tile_data())
}

/// Whether it also multiplies bytes.
pub(crate) fn is_supported_int8() -> bool {
    const AMX_INT8: u32 = 1 << 25;
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| is_supported() && has(AMX_INT8))
}

/// Whether the processor has all of these features of leaf 7.
fn has(features: u32) -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & features == features
}

/// Linux gives a process the large tile state on request.
#[cfg(target_os = "linux")]
fn request_tile_data() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn request_tile_data() -> bool {
    false
}

/// A tile of sums, [16 rows of w][rows of x], and room to read 16 from any row on.
pub(super) type TileSums = [f32; LANES * LANES + LANES];

pub(super) const EMPTY: TileSums = [0.0; LANES * LANES + LANES];

/// Operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row, by register.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0 to 3: sums of both vectors of w with the first tile of x, then with the second;
/// 4 and 5: w; 6 and 7: x.
pub(super) fn configure([m0, m1]: [usize; 2]) {
    let rows = |columns: usize| if columns > 0 { LANES } else { 0 };
    load_config([m0, m0, m1, m1, LANES, LANES, m0, m1].map(|columns| (rows(columns), columns * 4)));
}

/// Rows, and bytes of a row, of each register.
fn load_config(registers: [(usize, usize); 8]) {
    let mut config =
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    for (i, (rows, bytes)) in registers.into_iter().enumerate() {
        config.row_bytes[i] = bytes as u16;
        config.rows[i] = rows as u8;
    }
    // SAFETY: the process may use AMX; the operand is a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) }
}

/// Gives the tile state back, so that a switch of threads need not save it.
pub(crate) fn release() {
    // SAFETY: the process may use AMX.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

/// Clears the sums of the first tile of x and, if there is one, of the second.
#[inline(always)]
pub(super) fn zero(two: bool) {
    // SAFETY: the registers are configured.
    unsafe { asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem)) }
    if two {
        // SAFETY: as above.
        unsafe { asm!("tilezero tmm2", "tilezero tmm3", options(nostack, nomem)) }
    }
}

/// Advances all sums by one step. `w` are pointers to 16 rows of 64 bytes and the bytes from row to
/// row; `x` are 16 words of each column of a tile.
///
/// # Safety
/// The registers are configured for the columns of the tiles, and `w` is readable.
#[inline(always)]
pub(super) unsafe fn multiply<T>(w: [(*const T, usize); 2], x: [(&[u32], usize); 2]) {
    debug_assert!(x.iter().all(|(x, m)| x.len() >= STEP_WORDS * m));
    // SAFETY: the caller promises that w is readable; x holds a tile.
    unsafe {
        asm!(
            "tileloadd tmm6, [{x} + {sx}]",
            "tileloadd tmm4, [{w0} + {s0}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{w1} + {s1}]",
            "tdpbf16ps tmm1, tmm5, tmm6",
            x = in(reg) x[0].0.as_ptr(), sx = in(reg) x[0].1 * 4,
            w0 = in(reg) w[0].0, s0 = in(reg) w[0].1,
            w1 = in(reg) w[1].0, s1 = in(reg) w[1].1,
            options(nostack, readonly)
        );
    }
    if x[1].1 > 0 {
        // SAFETY: as above; registers 4 and 5 hold w.
        unsafe {
            asm!(
                "tileloadd tmm7, [{x} + {sx}]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                x = in(reg) x[1].0.as_ptr(), sx = in(reg) x[1].1 * 4,
                options(nostack, readonly)
            );
        }
    }
}

/// Writes the sums of the tiles of x, `m` columns each, as rows of m values.
#[inline(always)]
pub(super) fn store(to: &mut [TileSums; 4], m: [usize; 2]) {
    let [a, b, c, d] = to.each_mut().map(|tile| tile.as_mut_ptr());
    // SAFETY: the registers are configured for 16 rows of m <= 16 values, which a tile has room for.
    unsafe {
        asm!("tilestored [{a} + {s}], tmm0", "tilestored [{b} + {s}], tmm1",
            a = in(reg) a, b = in(reg) b, s = in(reg) m[0] * 4, options(nostack));
    }
    if m[1] > 0 {
        // SAFETY: as above.
        unsafe {
            asm!("tilestored [{c} + {s}], tmm2", "tilestored [{d} + {s}], tmm3",
                c = in(reg) c, d = in(reg) d, s = in(reg) m[1] * 4, options(nostack));
        }
    }
}

/// Sums of bytes: [rows of x][16 rows of w].
#[repr(align(64))]
#[derive(Clone, Copy)]
pub(crate) struct ByteSums(pub [[u32; LANES]; LANES]);

/// Registers for products of bytes over `columns` (32 or 64) of k, of `m` rows of x. 0 and 1: sums of the high bytes of
/// x with both vectors of w; 2 and 3: of the low bytes; 4 and 5: high and low bytes of x; 6 and 7: w, a row for four
/// columns.
pub(crate) fn configure_bytes(m: usize, columns: usize) {
    let sums = (m, 4 * LANES);
    let x = (m, columns);
    let w = (columns / 4, 4 * LANES);
    load_config([sums, sums, sums, sums, x, x, w, w]);
    zero(true);
}

/// Advances the sums by `columns` of k. `x`: high bytes (signed) and low bytes (unsigned), [m][columns] each; `w`:
/// bytes (unsigned) of both vectors, [columns / 4][16 rows][4].
pub(crate) fn multiply_bytes(x: [&[u32]; 2], w: [&[u8]; 2], m: usize, columns: usize) {
    assert!(x.iter().all(|x| 4 * x.len() >= m * columns) && w.iter().all(|w| w.len() >= LANES * columns));
    // SAFETY: the registers are configured for these sizes, and the slices hold as much.
    unsafe {
        asm!(
            "tileloadd tmm4, [{high} + {sx}]",
            "tileloadd tmm6, [{w0} + {sw}]",
            "tdpbsud tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {sw}]",
            "tdpbsud tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{low} + {sx}]",
            "tdpbuud tmm2, tmm5, tmm6",
            "tdpbuud tmm3, tmm5, tmm7",
            high = in(reg) x[0].as_ptr(), low = in(reg) x[1].as_ptr(), sx = in(reg) columns,
            w0 = in(reg) w[0].as_ptr(), w1 = in(reg) w[1].as_ptr(), sw = in(reg) 4 * LANES,
            options(nostack, readonly)
        );
    }
}

/// Writes the sums and clears them.
pub(crate) fn take_bytes(to: &mut [ByteSums; 4]) {
    let [a, b, c, d] = to.each_mut().map(|tile| tile.0.as_mut_ptr());
    // SAFETY: the registers are configured for at most 16 rows of 16 words, which a tile has room for.
    unsafe {
        asm!("tilestored [{a} + {s}], tmm0", "tilestored [{b} + {s}], tmm1",
            "tilestored [{c} + {s}], tmm2", "tilestored [{d} + {s}], tmm3",
            a = in(reg) a, b = in(reg) b, c = in(reg) c, d = in(reg) d, s = in(reg) 4 * LANES, options(nostack));
    }
    zero(true);
}

/// FLOP of a round of [`peak`].
pub(crate) const PEAK_FLOP: usize = 2 * UNIT * UNIT * STEP;

/// Multiplies full tiles of zeros `rounds` times, to measure the limit of this machine.
pub(crate) fn peak(rounds: usize) {
    #[repr(align(64))]
    struct Tile([u32; STEP_WORDS * LANES]);
    let Tile(zeros) = &Tile([0; STEP_WORDS * LANES]);
    configure([LANES; 2]);
    zero(true);
    for _ in 0..rounds {
        // SAFETY: the registers are configured for these tiles, and zeros holds 16 rows of w.
        unsafe { multiply([(zeros.as_ptr(), STEP * 2); 2], [(zeros.as_slice(), LANES); 2]) };
    }
    release();
}
