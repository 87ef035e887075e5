//! Reads and checks `g_idx`, the group of each column.

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::format::IntFormat;

/// Returns the groups of the columns \[K\], or `None` if they are consecutive and the format has no act-order.
///
/// # Errors
/// A group out of range; groups other than the last one that differ in size; an order although the format has none.
pub(super) fn groups_of_columns(
    int: IntFormat,
    k: usize,
    stored: Option<&TensorView>,
) -> Result<Option<Vec<u32>>, String> {
    let Some(stored) = stored else { return Ok(None) };
    let size = int.group.columns(k);
    let mut found = whole_numbers(stored);
    // compressed-tensors writes -1 if the order was never set.
    if found.iter().all(|group| *group == -1) {
        found = (0..k).map(|column| (column / size) as i64).collect();
    }
    // Consecutive groups are the usual case. This test needs no division for each column, and there are tens of
    // thousands of matrices.
    let mut groups = found.chunks(size).zip(0i64..);
    if !int.act_order && groups.all(|(columns, group)| columns.iter().all(|found| *found == group)) {
        return Ok(None);
    }
    let mut counts = vec![0usize; k.div_ceil(size)];
    for (column, group) in found.iter().enumerate() {
        let slot = usize::try_from(*group).ok().and_then(|group| counts.get_mut(group));
        let Some(slot) = slot else {
            return Err(format!(
                "column {column} is of group {group}, but there are groups 0 to {}",
                counts.len() - 1
            ));
        };
        *slot += 1;
    }
    // The last group may be shorter.
    let expected = |group: usize| size.min(k - group * size);
    if let Some(group) = (0..counts.len()).find(|group| counts[*group] != expected(*group)) {
        return Err(format!("group {group} has {} columns, expected {}", counts[group], expected(group)));
    }
    if int.act_order {
        return Ok(Some(found.into_iter().map(|group| group as u32).collect()));
    }
    let column = (0..k).find(|column| found[*column] != (column / size) as i64).unwrap_or(0);
    Err(format!(
        "column {column} is of group {}, but without act-order it is of group {}; if the checkpoint was made with \
         act-order, set `desc_act` to true in its header",
        found[column],
        column / size
    ))
}

/// Returns the elements of an I32 or I64 tensor.
pub(super) fn whole_numbers(tensor: &TensorView) -> Vec<i64> {
    let bytes = tensor.data();
    match tensor.dtype() {
        Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
    }
}
