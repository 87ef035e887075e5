//! Experts with act-order: gate and up rows are put into the order of the down matrix's columns.
//!
//! A column of down multiplies the product of a gate row and an up row, and nothing else reads that product. So the
//! gate and up rows may be in any order, as long as down's columns have the same order. If it is the order in which the
//! columns are sorted by group, down is an ordinary matrix.

use std::ops::Range;

use candle_core::Result;

use super::sorted::is_order;
use super::{LogicalRows, QuantPart, QuantRows};
use crate::scheme::QuantScheme;

/// The gate and up matrices, and the down matrix, of each expert. They are reordered if down has act-order and all of
/// its inputs are on this rank. Otherwise they are unchanged.
pub(super) fn in_order_of_down<'a>(
    gate_up: Vec<QuantPart<'a>>,
    down: Vec<QuantPart<'a>>,
) -> (Vec<QuantPart<'a>>, Vec<QuantPart<'a>>) {
    let fits = |(gate_up, down): (&QuantPart, &QuantPart)| {
        let width = down.rows.shape().1;
        down.inputs == (0..width)
            && gate_up.rows.shape().0 == 2 * width
            && down.rows.perm().is_some_and(|perm| is_order(perm, width))
    };
    if gate_up.len() != down.len() || !gate_up.iter().zip(&down).all(fits) {
        return (gate_up, down);
    }
    let pairs = gate_up.into_iter().zip(down).map(|(gate_up, down)| {
        let order = down.rows.perm().unwrap_or_default().to_vec();
        let rows: Box<dyn QuantRows + 'a> = Box::new(OrderedRows { rows: gate_up.rows, order });
        let columns: Box<dyn QuantRows + 'a> = Box::new(SortedColumns(down.rows));
        (QuantPart { rows, inputs: gate_up.inputs }, QuantPart { rows: columns, inputs: down.inputs })
    });
    pairs.unzip()
}

/// The gate rows in a given order, then the up rows in the same order.
struct OrderedRows<'a> {
    rows: Box<dyn QuantRows + 'a>,
    order: Vec<u32>,
}

impl QuantRows for OrderedRows<'_> {
    fn shape(&self) -> (usize, usize) {
        self.rows.shape()
    }

    fn scheme(&self) -> QuantScheme {
        self.rows.scheme()
    }

    fn perm(&self) -> Option<&[u32]> {
        self.rows.perm()
    }

    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        let width = self.order.len();
        let mut row = LogicalRows::default();
        out.clear();
        for i in rows {
            let from = i / width * width + self.order[i % width] as usize;
            self.rows.read(from..from + 1, &mut row)?;
            out.append(&row);
        }
        Ok(())
    }
}

/// A matrix whose inputs are in the order in which its columns are read.
struct SortedColumns<'a>(Box<dyn QuantRows + 'a>);

impl QuantRows for SortedColumns<'_> {
    fn shape(&self) -> (usize, usize) {
        self.0.shape()
    }

    fn scheme(&self) -> QuantScheme {
        self.0.scheme().with_act_order(false)
    }

    fn perm(&self) -> Option<&[u32]> {
        None
    }

    fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
        self.0.read(rows, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::QuantGroup;

    /// A matrix in which every integer, scale and zero point shows its original place.
    struct Marked {
        n: usize,
        k: usize,
        perm: Option<Vec<u32>>,
    }

    const GROUP: usize = 2;

    impl QuantRows for Marked {
        fn shape(&self) -> (usize, usize) {
            (self.n, self.k)
        }
        fn scheme(&self) -> QuantScheme {
            let act_order = self.perm.is_some();
            QuantScheme::int(8, QuantGroup::Size(GROUP)).with_zero_points(true).with_act_order(act_order)
        }
        fn perm(&self) -> Option<&[u32]> {
            self.perm.as_deref()
        }
        fn read(&self, rows: Range<usize>, out: &mut LogicalRows) -> Result<()> {
            let groups = self.k.div_ceil(GROUP);
            let of =
                |width: usize| rows.clone().flat_map(move |row| (0..width).map(move |i| row * width + i));
            out.q = of(self.k).map(|i| i as u8).collect();
            out.scale = of(groups).map(|i| i as f32).collect();
            out.zero = of(groups).map(|i| i as u8).collect();
            Ok(())
        }
    }

    fn part<'a>(n: usize, k: usize, perm: Option<&[u32]>) -> QuantPart<'a> {
        let rows = Marked { n, k, perm: perm.map(<[u32]>::to_vec) };
        QuantPart { rows: Box::new(rows), inputs: 0..k }
    }

    fn rows(part: &QuantPart, rows: Range<usize>) -> Result<LogicalRows> {
        let mut out = LogicalRows { q: vec![9], scale: vec![9.0], zero: vec![9], ..LogicalRows::default() };
        part.rows.read(rows, &mut out)?;
        Ok(out)
    }

    #[test]
    fn gate_and_up_rows_lie_in_the_order_of_downs_columns() -> Result<()> {
        let order = [2, 0, 3, 1];
        let other = [1, 0, 3, 2];
        let made = in_order_of_down(
            vec![part(8, 4, Some(&other)), part(8, 4, None)],
            vec![part(5, 4, Some(&order)), part(5, 4, Some(&other))],
        );
        for (e, order) in [order, other].into_iter().enumerate() {
            let gate_up = &made.0[e];
            let down = &made.1[e];
            let plain = part(8, 4, None);
            let sorted = part(5, 4, None);
            for i in 0..8 {
                let from = i / 4 * 4 + order[i % 4] as usize;
                assert_eq!(rows(gate_up, i..i + 1)?, rows(&plain, from..from + 1)?, "row {i} of expert {e}");
            }
            // Single rows are read, also on both sides of the border between gate and up.
            let each = (2..7).map(|i| rows(gate_up, i..i + 1)).collect::<Result<Vec<_>>>()?;
            assert_eq!(rows(gate_up, 2..7)?.q, each.iter().flat_map(|row| row.q.clone()).collect::<Vec<_>>());
            assert_eq!(rows(gate_up, 3..3)?, LogicalRows::default());
            // Down is an ordinary matrix now. Gate and up keep the order of their own columns.
            assert_eq!((down.rows.perm(), down.rows.scheme()), (None, sorted.rows.scheme()));
            assert_eq!(rows(down, 1..5)?, rows(&sorted, 1..5)?);
            assert_eq!(gate_up.rows.perm(), [Some(&other[..]), None][e]);
        }
        Ok(())
    }

    #[test]
    fn other_experts_stay_as_they_came() -> Result<()> {
        let order = [2, 0, 3, 1];
        let cut = QuantPart { inputs: 0..2, ..part(5, 4, Some(&order)) };
        for (why, gate_up, down) in [
            ("a rank's part of the columns", part(4, 4, None), cut),
            ("no order", part(8, 4, None), part(5, 4, None)),
            ("another number of rows", part(6, 4, None), part(5, 4, Some(&order))),
            ("a column that stands there twice", part(8, 4, None), part(5, 4, Some(&[2, 0, 2, 1]))),
        ] {
            let perm = down.rows.perm().map(<[u32]>::to_vec);
            let (gate_up, down) = in_order_of_down(vec![gate_up], vec![down]);
            assert_eq!(down[0].rows.perm(), perm.as_deref(), "{why}");
            assert_eq!(rows(&gate_up[0], 1..2)?.q, [4, 5, 6, 7], "{why}");
        }
        Ok(())
    }
}
