from mezzo.compat.mxnet.mod import BucketingModule


def test_networks_are_made_once_for_each_bucket():
    made = []

    def sym_gen(key):
        made.append(key)
        return (lambda x: x * key), ["data"], ["label"]

    module = BucketingModule(sym_gen, default_bucket_key=2, context="cpu")
    assert (module.forward(3), module(3, bucket_key=5), module.forward(1)) == (6, 15, 5)
    module.switch_bucket(2)
    assert module.forward(1) == 2
    assert made == [2, 5]


def test_mapped_networks_are_changed_now_and_later():
    module = BucketingModule(lambda key: lambda x: x * key, default_bucket_key=2)
    module.forward(1)
    mapped = module.mapped(lambda network: lambda x: -network(x))
    assert (mapped.forward(3), mapped.forward(3, bucket_key=4)) == (-6, -12)
    assert module.forward(3) == 6
