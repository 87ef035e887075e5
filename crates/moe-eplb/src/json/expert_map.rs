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
    let layers = by_id(&document["layer_list"], "layer_list", "layer_id")?;
    if document["moe_layer_count"].as_u64() != Some(layers.len() as u64) {
        return Err(format_error("moe_layer_count is not the number of layers"));
    }
    let mut slots = Vec::new();
    let mut shape = None;
    for layer in &layers {
        let devices = by_id(&layer["device_list"], "device_list", "device_id")?;
        for device in &devices {
            let row = device["device_expert"].as_array();
            let row = row.ok_or_else(|| format_error("device_expert is not an array"))?;
            if *shape.get_or_insert((devices.len(), row.len())) != (devices.len(), row.len()) {
                return Err(format_error("layers or devices differ in size"));
            }
            for expert in row {
                let id = expert.as_u64().and_then(|e| u32::try_from(e).ok());
                slots.push(id.ok_or_else(|| format_error("device_expert holds something else than ids"))?);
            }
        }
    }
    let (devices, width) = shape.ok_or(Error::Empty("layers"))?;
    let topology = Topology::new(experts, devices * width, devices)?;
    let placement = Placement::from_phy2log(&topology, layers.len(), slots)?;
    Ok((topology, placement))
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
