//! The expert-map file of vllm-ascend: a static placement, layer by layer, device by device.
//!
//! `{"moe_layer_count": L, "layer_list": [{"layer_id": 0, "device_count": D, "device_list":
//! [{"device_id": 0, "device_expert": [..]}, ..]}, ..]}`

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::placement::Placement;
use crate::topology::Topology;

/// A placement as an expert-map document.
pub fn write_expert_map(placement: &Placement) -> Value {
    let k = placement.slots_per_device();
    let layers: Vec<Value> = (0..placement.layers())
        .map(|layer| {
            let devices: Vec<Value> = placement
                .layer(layer)
                .chunks_exact(k)
                .enumerate()
                .map(|(device, experts)| json!({ "device_id": device, "device_expert": experts }))
                .collect();
            json!({ "layer_id": layer, "device_count": devices.len(), "device_list": devices })
        })
        .collect();
    json!({ "moe_layer_count": layers.len(), "layer_list": layers })
}

/// Reads an expert-map document for `experts` logical experts. Layers and devices may come in any
/// order; every one must be there.
///
/// # Errors
/// If the document has another form, devices differ in slots, or an id is out of range.
pub fn read_expert_map(document: &Value, experts: usize) -> Result<(Topology, Placement)> {
    let layers = read_expert_rows(document)?;
    let (devices, width) = match layers.first() {
        Some(rows) => (rows.len(), rows.first().map_or(0, Vec::len)),
        None => return Err(Error::Empty("layers")),
    };
    if layers.iter().any(|rows| rows.len() != devices || rows.iter().any(|row| row.len() != width)) {
        return Err(format_error("layers or devices differ in size"));
    }
    let topology = Topology::new(experts, devices * width, devices)?;
    let placement = Placement::from_phy2log(&topology, layers.len(), layers.concat().concat())?;
    Ok((topology, placement))
}

/// The experts of each device of each layer of an expert-map document, `[layers][devices][slots]`, whose devices may
/// differ in slots.
///
/// # Errors
/// If the document has another form.
pub fn read_expert_rows(document: &Value) -> Result<Vec<Vec<Vec<u32>>>> {
    let layers = by_id(&document["layer_list"], "layer_list", "layer_id")?;
    if document["moe_layer_count"].as_u64() != Some(layers.len() as u64) {
        return Err(format_error("moe_layer_count is not the number of layers"));
    }
    let id = |expert: &Value| {
        let id = expert.as_u64().and_then(|e| u32::try_from(e).ok());
        id.ok_or_else(|| format_error("device_expert holds something else than ids"))
    };
    let device = |device: &Value| {
        let row = device["device_expert"].as_array();
        row.ok_or_else(|| format_error("device_expert is not an array"))?.iter().map(id).collect()
    };
    let layer = |layer: &Value| {
        by_id(&layer["device_list"], "device_list", "device_id")?.into_iter().map(device).collect()
    };
    layers.into_iter().map(layer).collect()
}

/// The entries of an array in the order of their ids, which must be 0, 1, ...
fn by_id<'a>(list: &'a Value, name: &str, id: &str) -> Result<Vec<&'a Value>> {
    let list = list.as_array().ok_or_else(|| format_error(&format!("{name} is not an array")))?;
    let mut sorted = vec![None; list.len()];
    for entry in list {
        let index = entry[id].as_u64().map(|i| i as usize);
        match index.and_then(|i| sorted.get_mut(i)) {
            Some(slot @ None) => *slot = Some(entry),
            _ => return Err(format_error(&format!("{id} is missing, repeated or out of range in {name}"))),
        }
    }
    Ok(sorted.into_iter().flatten().collect())
}

fn format_error(reason: &str) -> Error {
    Error::Format { line: 0, reason: format!("expert map: {reason}") }
}
