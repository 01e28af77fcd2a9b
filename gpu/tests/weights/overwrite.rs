//! Taking over the bytes of other weights.

use crate::*;
use weightd_core::content::Generation;
use weightd_gpu::{Difference, OverwriteError, TensorForm};

fn differences(own: &mut Weights, new: &Weights) -> Vec<Difference> {
    let before: Vec<Vec<u8>> = own.tensors().map(|view| packed(&view)).collect();
    let error = own.overwrite(new).unwrap_err();
    assert!(
        own.tensors().map(|view| packed(&view)).eq(before),
        "nothing was copied"
    );
    match error {
        OverwriteError::Differ { differences } => differences,
        error => panic!("{error}"),
    }
}

#[test]
fn bytes_come_by_name_whatever_the_layouts_are() {
    let mut own = mapped(&[b"abcdef", b"xxtied"], |builder| {
        builder.tensor("rows", u8s(&[2, 3], None, 0, 0));
        builder.tensor("embed", u8s(&[4], None, 1, 2));
        builder.tensor("none", u8s(&[0, 3], None, 0, 0));
        builder.alias("head", "embed");
    })
    .duplicate()
    .unwrap();
    let generation = Generation { epoch: 1, number: 2 };
    // Columns first, with a gap; the names of the tied tensor are the other way round.
    let new = mapped(&[b"TIED____", b"..AD-BE-CF-"], |builder| {
        builder.tensor("head", u8s(&[4], None, 0, 0));
        builder.tensor("rows", u8s(&[2, 3], Some(&[1, 3]), 1, 2));
        builder.tensor("none", u8s(&[0, 3], None, 0, 8));
        builder.tensor("more", u8s(&[1], None, 0, 7));
        builder.alias("embed", "head");
    })
    .with_generation(generation);
    let addresses: Vec<u64> = own.tensors().map(|view| view.address()).collect();
    own.overwrite(&new).unwrap();
    assert_eq!(elements(&own, "rows"), b"ABCDEF");
    assert_eq!(own.get("rows").unwrap().contiguous(), Some(&b"ABCDEF"[..]));
    assert_eq!(elements(&own, "head"), b"TIED");
    assert!(
        own.tensors().map(|view| view.address()).eq(addresses),
        "addresses stay"
    );
    assert_eq!(own.generation(), Some(generation));
    assert_eq!(own.get("embed").unwrap().index(0).address() % 4096, 2);
}

#[test]
fn names_types_and_shapes_are_checked_before_the_first_byte() {
    let mut own = mapped(&[b"abcdefgh"], |builder| {
        builder.tensor("same", u8s(&[2], None, 0, 0));
        builder.tensor("shape", u8s(&[2, 1], None, 0, 2));
        let dtype = Dtype::F16;
        builder.tensor(
            "dtype",
            TensorSpec {
                dtype,
                ..u8s(&[1], None, 0, 4)
            },
        );
        builder.tensor("gone", u8s(&[2], None, 0, 6));
        builder.alias("alias", "same");
    })
    .duplicate()
    .unwrap();
    let new = mapped(&[b"ABCDEFGH"], |builder| {
        builder.tensor("same", u8s(&[2], None, 0, 0));
        builder.tensor("shape", u8s(&[2], None, 0, 2));
        let dtype = Dtype::BF16;
        builder.tensor(
            "dtype",
            TensorSpec {
                dtype,
                ..u8s(&[1], None, 0, 4)
            },
        );
    });
    let form = |dtype, shape: &[u64]| TensorForm {
        dtype,
        shape: shape.to_vec(),
    };
    let told = |name: &str, here, there| Difference::Form {
        name: name.to_owned(),
        here,
        there,
    };
    let missing = |name: &str| Difference::Missing {
        name: name.to_owned(),
        here: form(Dtype::U8, &[2]),
    };
    let expected = [
        told("shape", form(Dtype::U8, &[2, 1]), form(Dtype::U8, &[2])),
        told("dtype", form(Dtype::F16, &[1]), form(Dtype::BF16, &[1])),
        missing("gone"),
        missing("alias"),
    ];
    assert_eq!(differences(&mut own, &new), expected);
    assert_eq!(
        own.overwrite(&new).unwrap_err().to_string(),
        "nothing was copied, since 4 of the tensors cannot be taken over: shape is U8 [2, 1] here and U8 \
         [2] there, dtype is F16 [1] here and BF16 [1] there, gone (U8 [2]) is missing, alias (U8 [2]) is \
         missing; attach to weights of the same model, types and layout, or load afresh"
    );
}

#[test]
fn a_message_lists_some_and_the_error_all() {
    let many = |count: usize| {
        mapped(&[&[0; 30]], |builder| {
            for number in 0..count {
                builder.tensor(&format!("t{number}"), u8s(&[1], None, 0, number as u64));
            }
        })
    };
    let mut own = many(30).duplicate().unwrap();
    let error = own.overwrite(&many(0)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("t7 (U8 [1]) is missing and 22 more;"), "{text}");
    assert!(!text.contains("t8 "), "{text}");
    assert_eq!(differences(&mut own, &many(0)).len(), 30);
}

#[test]
fn mapped_tensors_are_not_overwritten() {
    let model = |bytes: &[u8]| {
        mapped(&[bytes], |builder| {
            builder.tensor("a", u8s(&[2], None, 0, 0));
            builder.tensor("b", u8s(&[2], None, 0, 2));
            builder.tensor("none", u8s(&[0], None, 0, 0));
        })
    };
    let (mut own, new) = (model(b"aabb"), model(b"AABB"));
    own.make_writable(|name| name == "a").unwrap();
    let error = own.overwrite(&new).unwrap_err();
    assert!(
        matches!(&error, OverwriteError::Mapped { tensor } if tensor == "b"),
        "{error}"
    );
    assert_eq!(elements(&own, "a"), b"aa");
    own.make_writable(|name| name == "b").unwrap();
    own.overwrite(&new).unwrap();
    assert_eq!(
        (elements(&own, "a"), elements(&own, "b")),
        (b"AA".to_vec(), b"BB".to_vec())
    );
}

/// `qkv` with its parts, at this offset of a region.
fn fused(bytes: &[u8], offset: u64) -> Weights {
    mapped(&[&[&vec![b'.'; offset as usize], bytes].concat()], |builder| {
        builder.tensor("qkv", u8s(&[2, 4], None, 0, offset));
        builder.tensor("q", u8s(&[2, 2], Some(&[4, 1]), 0, offset));
        builder.tensor("k", u8s(&[2, 1], Some(&[4, 1]), 0, offset + 2));
        builder.tensor("v", u8s(&[2, 1], Some(&[4, 1]), 0, offset + 3));
    })
}

#[test]
fn parts_of_a_fused_tensor_come_with_it_and_only_so() {
    let mut own = fused(b"qqkvqqkv", 0).duplicate().unwrap();
    own.overwrite(&fused(b"12345678", 3)).unwrap();
    assert_eq!(elements(&own, "qkv"), b"12345678");
    assert_eq!(elements(&own, "q"), b"1256");

    // A part that is no part there could hold other bytes than the whole.
    let mut new = fused(b"abcdefgh", 0);
    new.make_writable(|name| name == "q").unwrap();
    let shared = |name: &str, with: &str| Difference::Shared {
        name: name.to_owned(),
        with: with.to_owned(),
    };
    assert_eq!(differences(&mut own, &new), [shared("q", "qkv")]);

    // The other way round any layout will do: each has memory of its own.
    let mut apart = fused(b"qqkvqqkv", 0);
    apart.make_writable(|_| true).unwrap();
    apart.overwrite(&new).unwrap();
    assert_eq!(
        (elements(&apart, "qkv"), elements(&apart, "v")),
        (b"abcdefgh".to_vec(), b"dh".to_vec())
    );
}

#[test]
fn what_lies_between_the_rows_of_another_comes_too() {
    let between = |bytes: &[u8]| {
        mapped(&[bytes], |builder| {
            builder.tensor("rows", u8s(&[2, 2], Some(&[4, 1]), 0, 0));
            builder.tensor("between", u8s(&[1], None, 0, 3));
        })
    };
    let mut own = between(b"rr_brr").duplicate().unwrap();
    own.overwrite(&between(b"RR_BSS")).unwrap();
    assert_eq!(
        (elements(&own, "rows"), elements(&own, "between")),
        (b"RRSS".to_vec(), b"B".to_vec())
    );
}

#[test]
fn an_alias_must_be_one_there_too() {
    let mut own = mapped(&[b"tied"], |builder| {
        builder.tensor("embed", u8s(&[4], None, 0, 0));
        builder.alias("head", "embed");
    })
    .duplicate()
    .unwrap();
    let untied = mapped(&[b"EMBDHEAD"], |builder| {
        builder.tensor("embed", u8s(&[4], None, 0, 0));
        builder.tensor("head", u8s(&[4], None, 0, 4));
    });
    let expected = Difference::Shared {
        name: "head".to_owned(),
        with: "embed".to_owned(),
    };
    assert_eq!(differences(&mut own, &untied), [expected]);
    let mut untied = untied.duplicate().unwrap();
    untied.overwrite(&own).unwrap();
    assert_eq!(
        (elements(&untied, "embed"), elements(&untied, "head")),
        (b"tied".to_vec(), b"tied".to_vec())
    );
}

#[test]
fn a_view_over_itself_comes_from_one_like_it() {
    let window = |bytes: &[u8], strides: &[u64]| {
        mapped(&[bytes], |builder| {
            builder.tensor("t", u8s(&[3, 2], Some(strides), 0, 0))
        })
    };
    let mut own = window(b"abcd", &[1, 1]).duplicate().unwrap();
    own.overwrite(&window(b"ABCD", &[1, 1])).unwrap();
    assert_eq!(elements(&own, "t"), b"ABBCCD");
    assert!(matches!(
        &differences(&mut own, &window(b"ABCDEF", &[2, 1]))[..],
        [Difference::Shared { name, with }] if name == "t" && with == "t"
    ));
    let mut apart = window(b"......", &[2, 1]).duplicate().unwrap();
    apart.overwrite(&own).unwrap();
    assert_eq!(elements(&apart, "t"), b"ABBCCD");
    // One element that is there a million million times.
    let expanded = |bytes: &[u8]| {
        mapped(&[bytes], |builder| {
            builder.tensor("t", u8s(&[1 << 40], Some(&[0]), 0, 1))
        })
    };
    let mut own = expanded(b"ab").duplicate().unwrap();
    own.overwrite(&expanded(b"AB")).unwrap();
    assert_eq!(own.get("t").unwrap().host(), Some(&b"B"[..]));
}

/// A shape, and for each of two layouts the order in which dimensions lie and the gaps that they leave.
#[derive(Clone, Debug)]
struct Laid {
    dtype: Dtype,
    shape: Vec<u64>,
    layouts: [Vec<(u8, u64)>; 2],
    /// The dimension and the range of a part, in quarters.
    part: Option<(usize, u64)>,
}

fn laid() -> impl Strategy<Value = Laid> {
    let dtype = prop::sample::select(&[Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::F4][..]);
    let shape = prop::collection::vec(0u64..5, 0..4);
    let layout = || prop::collection::vec((any::<u8>(), prop::sample::select(&[0, 0, 0, 1, 3][..])), 4);
    let part = prop::option::of((0usize..3, 1u64..4));
    (dtype, shape, layout(), layout(), any::<bool>(), part).prop_map(
        |(dtype, mut shape, a, b, same, part)| {
            let b = if same { a.clone() } else { b };
            if dtype == Dtype::F4 {
                shape.push(2);
            }
            Laid {
                dtype,
                shape,
                layouts: [a, b],
                part: part.filter(|_| dtype != Dtype::F4),
            }
        },
    )
}

/// Strides for dimensions that lie in some order, with gaps after each.
fn strides(shape: &[u64], layout: &[(u8, u64)]) -> Vec<u64> {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    order.sort_by_key(|&dim| layout[dim].0);
    let (mut strides, mut next) = (vec![0; shape.len()], 1);
    for dim in order {
        strides[dim] = next;
        next = next * shape[dim].max(1) + layout[dim].1;
    }
    strides
}

/// All tensors in one of their layouts, in a region of such bytes.
fn lay(all: &[Laid], layout: usize, shift: u8) -> Weights {
    let memory: Vec<u8> = (0..1u32 << 16).map(|at| (at % 251) as u8 ^ shift).collect();
    mapped(&[&memory], |builder| {
        let mut offset = u64::from(shift) * 8;
        for (number, laid) in all.iter().enumerate() {
            let packed = laid.dtype == Dtype::F4;
            let strides = strides(&laid.shape, &laid.layouts[layout]);
            let strides = (!packed && !laid.shape.contains(&0)).then_some(&strides[..]);
            let spec = |shape, offset| TensorSpec {
                dtype: laid.dtype,
                ..u8s(shape, strides, 0, offset)
            };
            builder.tensor(&format!("t{number}"), spec(&laid.shape, offset));
            if let Some((dim, quarters)) = laid.part
                && let Some(strides) = strides
                && let Some(&size) = laid.shape.get(dim)
            {
                let mut shape = laid.shape.clone();
                let start = size * (quarters - 1) / 4;
                shape[dim] = size * quarters / 4 - start;
                let offset = offset + start * strides[dim] * laid.dtype.bits() / 8;
                builder.tensor(&format!("p{number}"), spec(&shape, offset));
            }
            offset += 4096;
        }
    })
}

proptest! {
    #[test]
    fn all_comes_or_nothing(all in prop::collection::vec(laid(), 1..6)) {
        let (mut own, new) = (lay(&all, 0, 0).duplicate().unwrap(), lay(&all, 1, 1));
        let before = own.duplicate().unwrap();
        let result = own.overwrite(&new);
        let parts = own.manifest().tensors().any(|tensor| tensor.name.starts_with('p'))
            || own.aliases().len() > 0;
        if let Err(error) = &result {
            prop_assert!(parts, "{}", error);
        }
        let source = if result.is_ok() { &new } else { &before };
        for (now, was) in own.tensors().zip(before.tensors()) {
            prop_assert_eq!(packed(&now), elements(source, now.name));
            // What lies between the elements is as it was.
            let mut between = vec![true; now.extent() as usize];
            let width = (now.dtype.bits() / 8) as usize;
            if now.is_contiguous() || now.name.starts_with('p') {
                continue;
            }
            for number in 0..now.elements() {
                let (mut rest, mut at) = (number, 0);
                for (size, stride) in now.shape.iter().zip(now.strides).rev() {
                    at += (rest % size * stride) as usize * width;
                    rest /= size;
                }
                between[at..at + width].fill(false);
            }
            let (now, was) = (now.host().unwrap(), was.host().unwrap());
            prop_assert!((0..now.len()).all(|at| !between[at] || now[at] == was[at]));
        }
    }
}
