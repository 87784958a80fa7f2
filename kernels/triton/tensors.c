/* Tensors, looked at through the C functions of DLPack. First of the files that native.py puts together. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* of dlpack.h, version 1.3, whose structs stay as they are within a major version */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct { uint32_t major, minor; void *previous; } header;
    void *allocate, *from_tensor, *to_tensor;
    /* borrows; -1 and a Python exception for what has no memory */
    int (*view)(void *tensor, DLTensor *out);
    void *stream;
} DLPackExchangeAPI;

enum { MAJOR = 1, COMPLEX = 5, DIMS = 64, WORDS = 5 + 2 * DIMS };

static const DLPackExchangeAPI *api;
static PyTypeObject *tensor_type;
static PyTypeObject *parameter_type;
static PyObject *is_conj, *is_neg;

/* an attribute of tensors, and how torch's own classes get it */
typedef struct {
    PyObject *name;
    const PyGetSetDef *own;
} Attribute;
static Attribute grad, version;

/* int64 numbers, as many as there come to be */
typedef struct {
    int64_t *data;
    size_t used, room;
} Numbers;

static int reserve(Numbers *numbers, size_t more) {
    if (numbers->used + more <= numbers->room)
        return 0;
    size_t room = 2 * (numbers->used + more);
    int64_t *data = PyMem_Realloc(numbers->data, room * sizeof(int64_t));
    if (!data) {
        PyErr_NoMemory();
        return -1;
    }
    numbers->data = data;
    numbers->room = room;
    return 0;
}

/* -1 with an exception, or for a count that tells of one */
static int append(Numbers *numbers, const int64_t *words, int count) {
    if (count < 0 || reserve(numbers, (size_t)count))
        return -1;
    memcpy(numbers->data + numbers->used, words, (size_t)count * sizeof *words);
    numbers->used += (size_t)count;
    return 0;
}

/* a new reference; NULL with an exception */
static PyObject *get(PyObject *tensor, const Attribute *attribute) {
    if (Py_IS_TYPE(tensor, parameter_type) || Py_IS_TYPE(tensor, tensor_type))
        return attribute->own->get(tensor, attribute->own->closure);
    return PyObject_GetAttr(tensor, attribute->name);
}

/* add the version counter of a tensor; -1 with an exception */
static int add_version(PyObject *tensor, long long *sum) {
    PyObject *one = get(tensor, &version);
    *sum += one ? PyLong_AsLongLong(one) : 0;
    Py_XDECREF(one);
    return PyErr_Occurred() ? -1 : 0;
}

/* whether a method of the tensor says yes; -1 with an exception */
static int says(PyObject *tensor, PyObject *method) {
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, method);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return yes;
}

/* whether memory holds the conjugate or the negative of what the tensor means; -1 with an exception */
static int is_lazy(PyObject *tensor, const DLTensor *view) {
    if (view->dtype.code == COMPLEX)
        return says(tensor, is_conj);
    /* a lazy negative is the imaginary part of a lazy conjugate, whose elements are never next to each other */
    for (int32_t i = 0; i < view->ndim; i++)
        if (view->strides[i] == 1 && view->shape[i] > 1)
            return 0;
    return says(tensor, is_neg);
}

/* 0 of what is empty */
static int64_t address_of(const DLTensor *view) {
    return view->data ? (int64_t)view->data + (int64_t)view->byte_offset : 0;
}

/* what a tensor, or None, is but for its address and values: the words of it, at most WORDS; -1 with an exception */
static int describe(PyObject *tensor, int64_t *address, int64_t *out) {
    *address = 0;
    *out = -1;
    if (tensor == Py_None)
        return 1;
    DLTensor view;
    if (api->view(tensor, &view))
        return -1;
    if (view.ndim > DIMS) {
        PyErr_Format(PyExc_BufferError, "a tensor of %d dimensions", (int)view.ndim);
        return -1;
    }
    int lazy = is_lazy(tensor, &view);
    if (lazy < 0)
        return -1;
    *address = address_of(&view);
    out[0] = view.ndim;
    out[1] = (int64_t)view.dtype.code << 32 | view.dtype.bits << 16 | view.dtype.lanes;
    out[2] = view.device.type;
    out[3] = view.device.id;
    out[4] = lazy;
    for (int32_t i = 0; i < view.ndim; i++) {
        out[5 + 2 * i] = view.shape[i];
        out[6 + 2 * i] = view.strides[i];
    }
    return 5 + 2 * view.ndim;
}

