//! Matrices of several number formats whose rows lie under each other.
//!
//! A row of x is packed once for each matrix, one after the other, and a unit is multiplied by the form of the matrix
//! that its panels are of. A unit whose panels are of two matrices, such as 16 gate rows and 16 up rows, is two
//! products. The bits are those that each matrix has alone.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::DType;

use super::floats::Floats;
use super::form::{Form, QuantProducts, Rows, Unit};
use super::panel::Ints;
use crate::cpu::simd::{LANES, Lanes};
use crate::cpu::tile::{UNIT, UnitSums};
use crate::exec::CpuIsa;
use crate::quant::QuantMatrix;
use crate::scheme::Codes;
use crate::storage::Element;

/// The form of the product with one matrix.
pub(super) enum FormOf<'a> {
    Ints(Ints<'a>),
    Floats(Floats<'a>),
}

/// The form of products of T with a matrix.
pub(super) fn form_of<T: Lanes>(w: &QuantMatrix, segments: Range<usize>, isa: CpuIsa) -> FormOf<'_> {
    match (w.scheme.codes, <T as Element>::DTYPE) {
        (Codes::Int(_) | Codes::E2m1 | Codes::Iq4Nl, DType::BF16 | DType::F16) => {
            FormOf::Ints(Ints { isa, w, segments, is_stacked: false })
        }
        _ => FormOf::Floats(Floats { isa, w, segments }),
    }
}

/// Calls a function of the trait of either form.
macro_rules! of_form {
    ($form:expr, $f:ident($($arg:expr),*)) => {
        match $form {
            FormOf::Ints(form) => Form::<T>::$f(form, $($arg),*),
            FormOf::Floats(form) => Form::<T>::$f(form, $($arg),*),
        }
    };
}

/// The forms of several matrices.
pub(super) struct Stacked<'a> {
    /// Each with its first panel among all.
    parts: Vec<(usize, FormOf<'a>)>,
}

thread_local! {
    /// The sums of a panel, before they go to the upper half of the unit that this thread works on.
    static UPPER: RefCell<Vec<UnitSums>> = const { RefCell::new(Vec::new()) };
}

impl<'a> Stacked<'a> {
    pub(super) fn new<T: Lanes>(p: &QuantProducts<'a, T>, isa: CpuIsa) -> Self {
        let mut first = 0;
        let part = |w: &'a QuantMatrix| {
            let mut form = form_of::<T>(w, p.segments.clone(), isa);
            if let FormOf::Ints(ints) = &mut form {
                ints.is_stacked = true;
            }
            first += w.panels();
            (first - w.panels(), form)
        };
        Self { parts: p.w.matrices().iter().map(part).collect() }
    }

    /// The part of a panel, and the panel's place there.
    fn place(&self, panel: usize) -> (usize, usize) {
        let started = self.parts.partition_point(|(first, _)| *first <= panel);
        let part = started.saturating_sub(1);
        (part, panel - self.parts[part].0)
    }

    /// The sums of one or two panels of a part.
    fn product<T: Lanes>(&self, part: usize, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]) {
        let before = self.parts[..part].iter().map(|(_, form)| of_form!(form, row_words(e)));
        let x = Rows { first: before.sum(), ..x };
        of_form!(&self.parts[part].1, unit(e, unit, x, sums));
    }
}

impl<T: Lanes> Form<T> for Stacked<'_> {
    fn row_words(&self, e: usize) -> usize {
        self.parts.iter().map(|(_, form)| of_form!(form, row_words(e))).sum()
    }

    fn packs_alike(&self, a: usize, b: usize) -> bool {
        self.parts.iter().all(|(_, form)| of_form!(form, packs_alike(a, b)))
    }

    fn tile_rows(&self, e: usize, m: usize) -> usize {
        // Of one size in all forms, since none is multiplied in matrix registers.
        of_form!(&self.parts[0].1, tile_rows(e, m))
    }

    fn pack(&self, e: usize, m: usize, rows: &[&[T]], panel: &mut [u32]) -> bool {
        let mut are_in_range = true;
        let mut rest = panel;
        for (_, form) in &self.parts {
            let (panel, tail) = rest.split_at_mut(rows.len() * of_form!(form, row_words(e)));
            rest = tail;
            are_in_range &= of_form!(form, pack(e, m, rows, panel));
        }
        are_in_range
    }

    fn unit(&self, e: usize, unit: Unit, x: Rows, sums: &mut [UnitSums]) {
        let (lower, first) = self.place(unit.first);
        let Some((upper, second)) = unit.second.map(|panel| self.place(panel)) else {
            return self.product::<T>(lower, e, Unit { first, second: None }, x, sums);
        };
        if lower == upper {
            return self.product::<T>(lower, e, Unit { first, second: Some(second) }, x, sums);
        }
        self.product::<T>(lower, e, Unit { first, second: None }, x, sums);
        UPPER.with_borrow_mut(|more| {
            more.resize(more.len().max(sums.len()), [0.0; UNIT]);
            let more = &mut more[..sums.len()];
            self.product::<T>(upper, e, Unit { first: second, second: None }, x, more);
            for (to, from) in sums.iter_mut().zip(&*more) {
                to[LANES..].copy_from_slice(&from[..LANES]);
            }
        });
    }
}
