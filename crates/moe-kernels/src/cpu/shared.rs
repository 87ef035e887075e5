//! A mutable slice whose parts are written by several tasks.

use std::marker::PhantomData;

/// A mutable slice that tasks share, each writing ranges that no other task touches: the columns
/// of a product, the rows that a scatter names.
pub(crate) struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: a Shared only hands out ranges through `range`, whose callers promise that no two live
// ranges overlap; so it is a set of `&mut [T]` that may each be sent to a thread.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Shares a slice.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The address of value `at`, for a prefetch. The value need not exist.
    pub(crate) fn address(&self, at: usize) -> *const T {
        self.start.wrapping_add(at)
    }

    /// The range `at..at + len`; panics if it is out of bounds.
    ///
    /// # Safety
    /// No two live ranges may overlap, on any thread.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at <= self.len && len <= self.len - at, "range {at}..{at}+{len} of {}", self.len);
        // SAFETY: the range is inside the slice, which is borrowed mutably for 'a; the caller
        // promises that nothing else refers to it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}
