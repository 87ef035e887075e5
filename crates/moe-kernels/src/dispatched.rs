//! The data that prepare passes to the experts, and the owner's data that combine needs.
//!
//! Dispatch separates two sides. The *experts' side* is the rows that this rank computes, with the ids of their slots;
//! they may come from other ranks. The *owner's side* is the routing of the tokens that this rank passed in. Only the
//! owner weights and adds a token's slot rows, so the token's ids and weights stay on the owner's rank.

use std::any::{Any, type_name};

use candle_core::{DType, Result, bail};

use crate::arguments::{expect, expect_dtype, expect_matrix, expect_rank3};
use crate::buffer::Scratch;
use crate::tags::ActivationFormat;
use crate::view::{Dims, View};

/// An array that is borrowed from the caller or owned by the dispatch.
// This enum is exhaustive: data is borrowed or owned.
#[derive(Debug)]
pub enum Lent<'a> {
    /// The caller's data without a copy.
    Borrowed(View<'a>),
    /// Data that prepare made.
    Owned(Scratch),
}

impl Lent<'_> {
    /// The data.
    pub fn view(&self) -> View<'_> {
        match self {
            Self::Borrowed(view) => *view,
            Self::Owned(scratch) => scratch.view(),
        }
    }
}

impl<'a> From<View<'a>> for Lent<'a> {
    fn from(view: View<'a>) -> Self {
        Self::Borrowed(view)
    }
}

impl From<Scratch> for Lent<'_> {
    fn from(scratch: Scratch) -> Self {
        Self::Owned(scratch)
    }
}

/// The result of one prepare call: rows for the experts of this rank, and the owner's routing.
///
/// T is the number of tokens that the caller owns, T' the number of rows that arrived (T' = T
/// without communication).
///
/// | field | Standard | Listed | BatchedExperts |
/// |---|---|---|---|
/// | `rows` | [T', H] | [T', H] | [E_local, max_tokens, H], see below |
/// | `topk_ids` | [T', K] u32, physical ids | the same | `None`: a row's expert is its first index |
/// | `topk_weights` | [T', K] f32, if they were sent | [T', K] f32 | `None` |
/// | `expert_num_tokens` | \[E_local\] u32, if prepare knows it | \[E_local\] u32 | \[E_local\] u32 |
/// | `expert_slots` | `None` | [E_local, T' * K] u32, see below | `None` |
/// | `expert_map` | \[P\] i32, `None` = identity | the same | the same |
/// | `owner_topk_ids`, `owner_topk_weights` | [T, K] u32, [T, K] f32 | the same | the same |
/// | experts return, f32, unweighted | [T', K, H] | [T', K, H] | [E_local, max_tokens, H] |
///
/// With BatchedExperts, expert e computes its first `expert_num_tokens[e]` rows, and the others are unspecified. With
/// Listed, expert e computes the first `expert_num_tokens[e]` slots t*K + k of row e of `expert_slots`. Slots of
/// [`NO_EXPERT`](crate::NO_EXPERT) and slots of experts on other ranks are not computed, and their rows of the experts'
/// output are never read.
///
/// Make one with [`standard`](Self::standard), [`batched`](Self::batched) or [`listed`](Self::listed), and set the
/// other fields as needed. The struct may get more fields.
#[derive(Debug)]
#[non_exhaustive]
pub struct Dispatched<'a> {
    /// Layout of `rows`.
    pub format: ActivationFormat,
    /// Activation rows in the model dtype.
    pub rows: Lent<'a>,
    /// Physical expert ids of the rows' slots; `u32::MAX` = no expert.
    pub topk_ids: Option<Lent<'a>>,
    /// Router weights of the rows' slots, for experts that reduce their rows themselves.
    pub topk_weights: Option<Lent<'a>>,
    /// Rows per local expert.
    pub expert_num_tokens: Option<Lent<'a>>,
    /// Slots of each local expert, in the Listed format.
    pub expert_slots: Option<Lent<'a>>,
    /// Local slot of each physical expert, -1 if it is on another rank.
    pub expert_map: Option<View<'a>>,
    /// The owner's ids of its own T tokens.
    pub owner_topk_ids: View<'a>,
    /// The owner's weights of its own T tokens.
    pub owner_topk_weights: View<'a>,
    /// Whether the rows were already multiplied by the router weight. Then combine must use weight 1.
    pub weights_applied: bool,
    /// [E, H] in the model dtype: what is added to each slot row of an expert after the segments in which ranks that
    /// cut experts have left its sums; `None`: nothing.
    pub slot_bias: Option<View<'a>>,
    handle: Option<Box<dyn Any + Send + Sync>>,
}

impl<'a> Dispatched<'a> {
    /// Rows [T, H] in the Standard format that stay with their owner. The experts use the owner's own ids [T, K] and
    /// weights [T, K].
    pub fn standard(rows: impl Into<Lent<'a>>, topk_ids: View<'a>, topk_weights: View<'a>) -> Self {
        Self {
            format: ActivationFormat::Standard,
            rows: rows.into(),
            topk_ids: Some(topk_ids.into()),
            topk_weights: Some(topk_weights.into()),
            expert_num_tokens: None,
            expert_slots: None,
            expert_map: None,
            owner_topk_ids: topk_ids,
            owner_topk_weights: topk_weights,
            weights_applied: false,
            slot_bias: None,
            handle: None,
        }
    }

    /// Rows [E_local, max_tokens, H] in the BatchedExperts format, with the rows per local expert
    /// \[E_local\] and the owner's ids and weights [T, K].
    pub fn batched(
        rows: impl Into<Lent<'a>>,
        expert_num_tokens: impl Into<Lent<'a>>,
        topk_ids: View<'a>,
        topk_weights: View<'a>,
    ) -> Self {
        Self {
            format: ActivationFormat::BatchedExperts,
            topk_ids: None,
            topk_weights: None,
            expert_num_tokens: Some(expert_num_tokens.into()),
            ..Self::standard(rows, topk_ids, topk_weights)
        }
    }

    /// Rows [T', H] in the Listed format. `lists` contains the slots of each local expert [E_local, T' * K] and their
    /// numbers \[E_local\]; `routing` contains the rows' own ids and weights [T', K].
    pub fn listed(
        rows: impl Into<Lent<'a>>,
        lists: (impl Into<Lent<'a>>, impl Into<Lent<'a>>),
        routing: (impl Into<Lent<'a>>, impl Into<Lent<'a>>),
        topk_ids: View<'a>,
        topk_weights: View<'a>,
    ) -> Self {
        Self {
            format: ActivationFormat::Listed,
            topk_ids: Some(routing.0.into()),
            topk_weights: Some(routing.1.into()),
            expert_num_tokens: Some(lists.1.into()),
            expert_slots: Some(lists.0.into()),
            ..Self::standard(rows, topk_ids, topk_weights)
        }
    }

    /// Attaches data that the backend needs again in finalize (counts, permutations, buffers).
    #[must_use]
    pub fn with_handle<T: Any + Send + Sync>(mut self, handle: T) -> Self {
        self.handle = Some(Box::new(handle));
        self
    }

    /// The data that the backend attached. It is an error if another backend attached it.
    pub fn handle<T: Any>(&self, op: &str) -> Result<&T> {
        match self.handle.as_deref().and_then(|h| h.downcast_ref()) {
            Some(handle) => Ok(handle),
            None => bail!(
                "{op}: expected rows that carry a {}; finalize with the backend that prepared them",
                type_name::<T>()
            ),
        }
    }

    /// The ids [T', K] of the rows' slots; an error if the format has none.
    pub fn topk_ids(&self) -> Result<View<'_>> {
        self.field("topk_ids", &self.topk_ids)
    }

    /// The weights [T', K] of the rows' slots; an error if they were not sent.
    pub fn topk_weights(&self) -> Result<View<'_>> {
        self.field("topk_weights", &self.topk_weights)
    }

    /// The rows per local expert \[E_local\]; an error if prepare does not know them.
    pub fn expert_num_tokens(&self) -> Result<View<'_>> {
        self.field("expert_num_tokens", &self.expert_num_tokens)
    }

    /// The slots of each local expert [E_local, T' * K]; an error in the other formats.
    pub fn expert_slots(&self) -> Result<View<'_>> {
        self.field("expert_slots", &self.expert_slots)
    }

    fn field<'b>(&self, name: &str, field: &'b Option<Lent<'a>>) -> Result<View<'b>> {
        match field {
            Some(field) => Ok(field.view()),
            None => bail!("dispatched rows in the {:?} format carry no {name}", self.format),
        }
    }

    /// Dims of the f32 rows that the experts return: [T', K, H], or [E_local, max_tokens, H] where rows are batched.
    pub fn expert_out_dims(&self) -> Result<Dims> {
        let rows = self.rows.view();
        match (self.format, rows.dims()) {
            (ActivationFormat::Standard | ActivationFormat::Listed, &[tokens, hidden]) => {
                let top_k = self.topk_ids()?.dims().get(1).copied().unwrap_or(0);
                Dims::new(&[tokens, top_k, hidden])
            }
            (ActivationFormat::BatchedExperts, dims @ &[_, _, _]) => Dims::new(dims),
            (format, dims) => bail!("dispatched rows with dims {dims:?} are not in the {format:?} format"),
        }
    }

    /// Whether it is certain that no row has arrived, so that the experts need not run. Finalize must still be called:
    /// on several ranks it is a collective.
    pub fn is_empty(&self) -> bool {
        self.rows.view().elem_count() == 0
    }
}

/// The results of this rank's experts for rows [T', ..] of all ranks, in f32.
#[derive(Clone, Copy, Debug)]
pub struct SlotRows<'a> {
    /// One row for each slot, [T', K, H], unweighted. Or, if `routing` is `None`, the weighted sums [T', H].
    pub rows: View<'a>,
    /// The weights of slots, and which of them this rank has; `None` if they were already added.
    pub routing: Option<SlotRouting<'a>>,
}

/// The weights of the slots [T', K] of rows, and which of them this rank has.
#[derive(Clone, Copy, Debug)]
pub struct SlotRouting<'a> {
    /// [T', K] u32 physical ids; `u32::MAX` = no expert.
    pub topk_ids: View<'a>,
    /// [T', K] f32.
    pub topk_weights: View<'a>,
    /// \[P\] i32, local slot of each physical expert, -1 if it is on another rank; `None` means that all are on this
    /// rank.
    pub expert_map: Option<View<'a>>,
}

impl SlotRows<'_> {
    /// Returns T', K and H; K is 1 if slots were already added.
    ///
    /// # Errors
    /// Wrong dims or dtypes.
    pub fn check(&self, op: &str) -> Result<(usize, usize, usize)> {
        expect_dtype(op, "slots", &self.rows, DType::F32)?;
        let Some(routing) = &self.routing else {
            let (tokens, hidden) = expect_matrix(op, "sums", &self.rows)?;
            return Ok((tokens, 1, hidden));
        };
        let (tokens, top_k, hidden) = expect_rank3(op, "slots", &self.rows)?;
        expect(op, "topk_ids", &routing.topk_ids, DType::U32, &[tokens, top_k])?;
        expect(op, "topk_weights", &routing.topk_weights, DType::F32, &[tokens, top_k])?;
        Ok((tokens, top_k, hidden))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_carry_what_they_promise() -> Result<()> {
        let rows = [0f32; 12];
        let ids = [0u32, 1];
        let weights = [0.5f32; 2];
        let counts = [1u32, 1];
        let ids = View::new(&ids, &[1, 2])?;
        let weights = View::new(&weights, &[1, 2])?;
        let d = Dispatched::standard(View::new(&rows[..3], &[1, 3])?, ids, weights);
        assert_eq!(&*d.expert_out_dims()?, &[1, 2, 3]);
        assert_eq!(d.topk_ids()?.dims(), &[1, 2]);
        let e = d.expert_num_tokens().unwrap_err().to_string();
        assert!(e.contains("Standard format carry no expert_num_tokens"), "{e}");

        let counts = View::new(&counts, &[2])?;
        let d = Dispatched::batched(View::new(&rows, &[2, 2, 3])?, counts, ids, weights);
        assert_eq!(&*d.expert_out_dims()?, &[2, 2, 3]);
        assert!(!d.is_empty());
        let e = d.expert_slots().unwrap_err().to_string();
        assert!(e.contains("BatchedExperts format carry no expert_slots"), "{e}");
        let e = d.topk_ids().unwrap_err().to_string();
        assert!(e.contains("BatchedExperts format carry no topk_ids"), "{e}");

        let slots = View::new(&[0u32, 0, 1, 0], &[2, 2])?;
        let d = Dispatched::listed(
            View::new(&rows[..3], &[1, 3])?,
            (slots, counts),
            (ids, weights),
            ids,
            weights,
        );
        assert_eq!((d.format, &*d.expert_out_dims()?), (ActivationFormat::Listed, &[1, 2, 3][..]));
        assert_eq!((d.expert_slots()?.dims(), d.topk_weights()?.dims()), (&[2, 2][..], &[1, 2][..]));
        Ok(())
    }

    #[test]
    fn a_foreign_handle_is_refused() -> Result<()> {
        let ids = View::new::<u32>(&[], &[0, 2])?;
        let weights = View::new::<f32>(&[], &[0, 2])?;
        let d = Dispatched::standard(View::new::<f32>(&[], &[0, 3])?, ids, weights).with_handle(7usize);
        assert_eq!(*d.handle::<usize>("finalize")?, 7);
        let e = d.handle::<String>("finalize").unwrap_err().to_string();
        assert!(e.contains("finalize: expected rows that carry a alloc::string::String"), "{e}");
        assert!(d.is_empty());
        Ok(())
    }
}
